"""Whether work in a thread lets others go on."""

import threading
from collections.abc import Callable


def turns_during(work: Callable[[], object]) -> int:
    """How often this thread has had its turn while `work` ran in another."""
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        work()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    passed = 0
    while not ended.is_set():
        passed += 1
    thread.join()
    return passed

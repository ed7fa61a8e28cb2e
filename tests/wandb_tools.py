"""What Weights & Biases was given: read back from a run folder, or from a server that knows just enough."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread


class Told:
    """`rows` in the order of their steps, `summary`, `alerts`, and `run` (id, name, project, config)."""

    def __init__(self, folder: Path):
        (self.folder,) = [path for path in (folder / "wandb").iterdir() if path.is_dir()]
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(self.folder)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found = [json.loads(line) for line in lines]
        self.rows = [record["history"]["item"] for record in found if record["type"] == "history"]
        self.run = next(record["run"] for record in found if record["type"] == "run")
        self.alerts = [record["alert"] for record in found if record["type"] == "alert"]
        self.summary = {}
        for record in found:
            self.summary |= record["summary"]["update"] if record["type"] == "summary" else {}

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]

    def numbers(self) -> dict[int, dict[str, float]]:
        """By step, without what Weights & Biases adds and without pictures."""
        return {
            row["_step"]: {key: value for key, value in row.items() if key[0] != "_" and key[:6] != "heads/"}
            for row in self.rows
        }

    def pictures(self) -> dict[int, dict[str, Path]]:
        """By step and statistic, the files; they exist."""
        found = {}
        for row in self.rows:
            for key, value in row.items():
                if key.startswith("heads/") and key.endswith(".path"):
                    path, name = self.folder / "files" / value, key[len("heads/") : -len(".path")]
                    assert path.is_file()
                    found.setdefault(row["_step"], {})[name] = path
        return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def do_PUT(self) -> None:
        self.body()
        self.answer({})

    def do_POST(self) -> None:
        body, server = self.body(), self.server
        if server.silent.is_set():
            server.over.wait()
            return
        request = json.loads(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
        if "query" in request:
            operation = re.search(r"(query|mutation) (\w+)", request["query"])[2]
            self.answer({"data": server.data(operation, request["variables"])})
            return
        for row in request.get("files", {}).get("wandb-history.jsonl", {"content": []})["content"]:
            server.rows.append(json.loads(row))
        self.answer({})

    def answer(self, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Knows of one run: its `rows`, and by `names` whether it exists. When `silent` it answers no more."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.rows, self.names, self.silent, self.over = [], set(), Event(), Event()

    def handle_error(self, *arguments: object) -> None:
        """The client hangs up when it likes."""

    def data(self, operation: str, variables: dict) -> dict:
        name, exists = variables.get("name"), variables.get("name") in self.names
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "someone"}}
        bucket = {
            **{"id": name, "name": name, "displayName": name, "project": project, "tags": []},
            **{"config": "{}", "wandbConfig": '{"t": 1}', "summaryMetrics": "{}", "eventsTail": "[]"},
            **{"historyLineCount": len(self.rows), "logLineCount": 0, "eventsLineCount": 0},
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[-1:]]),
        }
        if operation == "RunResumeStatus":
            return {"model": {**project, "bucket": bucket if exists else None}}
        if operation == "UpsertBucket":
            self.names.add(name)
            return {"upsertBucket": {"bucket": bucket, "inserted": not exists}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": self.url} for file in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()

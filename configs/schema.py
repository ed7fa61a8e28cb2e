"""Every key of a run: type, default, meaning. Cross-checks name the key, what was asked and what is possible.

A key that would have no effect beside the others is refused rather than ignored; a section that `every: 0`
switches off keeps its other keys. Keys left at null are filled in with what they resolve to, so that
`runs/X/config.yaml` is complete.
"""

import re
from functools import partial
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic import Field as Key

Source = Literal["shakespeare", "text", "hf", "repeats", "backcopy"]
WHOLE: set[Source] = {"shakespeare", "text"}  # texts that are read whole
TEXTS: set[Source] = {*WHOLE, "hf"}
Tokens = Literal["char", "byte", "bpe", "hf", "gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base"]
HUB: dict[str, dict[str, str]] = {  # short names of `data.name`
    "tinystories": {"name": "roneneldan/TinyStories"},
    "wikitext-103": {
        "name": "Salesforce/wikitext",
        "subset": "wikitext-103-raw-v1",
        "new_document": r"^ = [^=].*[^=] = \n?$",  # rows are lines: the title of an article
    },
    "fineweb-edu": {"name": "HuggingFaceFW/fineweb-edu", "subset": "sample-10BT"},
    "openwebtext": {"name": "Skylion007/openwebtext"},
}
Backend = Literal["auto", "naive", "sdpa", "blocks"]
MIN_CONTEXT = 17  # the shortest context that holds BOS and a probe block of 8 tokens twice
HF_DEFAULTS: dict[str, Any] = dict.fromkeys(("name", "subset", "revision", "take", "new_document"))
HF_DEFAULTS |= {"split": "train", "text_column": "text", "streaming": True}
HF_DEFAULTS |= {"windows": "anywhere", "mask_documents": False}


class Section(BaseModel):
    """Base of all sections: unknown keys are errors; values change no more once nulls are filled."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps: yes` would count as 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        parts = value.values() if get_origin(annotation) is dict and isinstance(value, dict) else [value]
        takes_bool = bool in (annotation, *get_args(annotation))
        if not takes_bool and any(isinstance(part, bool) for part in parts):
            raise ValueError(f"true or false has no meaning here; got {str(value).lower()}")
        return value

    def _fill(self, key: str, default: Any, used: bool = True, condition: str = "") -> None:
        """Give a key left at null its default; without `condition` it has no effect, so refuse it."""
        if used and getattr(self, key) is None:
            self.__dict__[key] = default
        elif not used and getattr(self, key) is not None:
            raise ValueError(f"{key} is used with {condition} only: set it to null, or set {condition}")


Count, Size = partial(Key, ge=0), partial(Key, ge=1, le=2**20)


class Run(Section):
    dir: str = Key("runs/default", min_length=1, description="folder that receives the run")
    device: Literal["auto", "cpu", "cuda", "mps"] = Key(
        "auto", description="where the model lives; auto: cuda where there is one, else cpu"
    )
    seed: int = Count(1, description="seed of initialisation, data order, dropout, evaluation and probes")
    overwrite: bool = Key(False, description="empty a run folder that is in use and start afresh")


class Stage(Section):
    until: int | None = Key(None, ge=1, description="last step of the stage; the last stage has none")
    weights: dict[Source, float] = Key(min_length=1, description="share of each source in a batch")

    @field_validator("weights")
    @classmethod
    def _positive(cls, weights: dict[Source, float]) -> dict[Source, float]:
        if bad := [f"{name} {weight}" for name, weight in weights.items() if not weight > 0]:
            raise ValueError(f"weights must be above 0; got {', '.join(bad)}")
        return weights


class Data(Section):
    source: Source = Key(
        "shakespeare",
        description="nine plays (embedded), whole text files, documents by `datasets` (hf), random repeats, "
        "Bigram-Backcopy",
    )
    stages: list[Stage] = Key(
        [], description='mixtures in turn [{"until": 9, "weights": {"repeats": 1}}, {"weights": {"text": 1}}]'
    )
    path: str | None = Key(None, description="text: a file or a glob, UTF-8; hf: also .jsonl and .parquet")
    name: str | None = Key(None, description=f"hf: a data set of the hub, {', '.join(HUB)}, or a folder")
    subset: str | None = Key(None, description="hf: configuration of the data set")
    revision: str | None = Key(None, description="hf: branch, tag or commit of the data set")
    split: str | None = Key(None, description="hf: split that is read (null: train)")
    text_column: str | None = Key(None, description="hf: column that holds the text (null: text)")
    streaming: bool | None = Key(None, description="hf: read without downloading all first (null: true)")
    take: int | None = Key(None, ge=1, description="hf: documents read (null: all)")
    new_document: str | None = Key(
        None, description="hf: where rows are lines, what matches the first line of a document"
    )
    windows: Literal["anywhere", "documents"] | None = Key(
        None,
        description="hf: where windows begin; documents: whole ones side by side, padded (null: anywhere)",
    )
    mask_documents: bool | None = Key(None, description="hf: attention stays in a document (null: false)")
    tokenizer: Tokens = Key(
        "char",
        description="a token per character, per byte, trained on the corpus, that of the published model in "
        "model.init_from (hf), or one of tiktoken's",
    )
    vocab_size: int | None = Key(None, ge=257, le=2**20, description="bpe: tokens, BOS included (null: 4096)")
    bos: bool = Key(True, description="put the token BOS in front of every window")
    val_fraction: float | None = Key(
        None, gt=0, lt=1, description="validation: the last share (null: 0.1); hf: documents by hash (0.01)"
    )
    cache_dir: str = Key("cache", min_length=1, description="folder of the memory-mapped tokens")

    @field_validator("new_document")
    @classmethod
    def _pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}; got {pattern!r}") from None
        return pattern

    @model_validator(mode="after")
    def _check(self) -> "Data":
        text, hf, whole = "text" in self.sources, "hf" in self.sources, WHOLE.intersection(self.sources)
        if hf and whole:
            raise ValueError(f"sources hf and {whole.pop()} cannot be mixed: a run has one text")
        self._fill("path", None, text or hf, "data.source text or hf")
        if text and not self.path:
            raise ValueError("source text needs data.path, a text file or a glob such as 'books/*.txt'")
        if hf and bool(self.path) == bool(self.name):
            raise ValueError("source hf needs data.name, a data set, or data.path, files; and not both")
        for key, value in HUB.get(self.name or "", {}).items():
            self.__dict__[key] = value if key == "name" else getattr(self, key) or value
        for key, default in HF_DEFAULTS.items():
            self._fill(key, default, hf, "data.source hf")
        if hf and self.path and (self.subset or self.revision or self.split != "train"):
            raise ValueError("subset, revision and split are of data.name; the files of data.path have none")
        if hf and self.tokenizer == "char":
            raise ValueError("source hf has no tokenizer char, which reads all first: use byte, bpe or gpt2")
        self._fill("vocab_size", 4096, self.tokenizer == "bpe", "data.tokenizer bpe")
        self._fill("val_fraction", 0.01 if hf else 0.1, bool(whole) or hf, "a text source")
        ends = [stage.until or 0 for stage in self.stages]
        got = ", ".join(str(end or "none") for end in ends)
        if ends and (ends.pop() or 0 in ends or sorted({*ends}) != ends):
            raise ValueError(f"the 'until' of stages must rise, and only the last has none; got {got}")
        return self

    @property
    def sources(self) -> list[Source]:
        """All sources in use; the first, `data.source`, is the one that is validated on."""
        return list(dict.fromkeys([self.source, *(name for stage in self.stages for name in stage.weights)]))


class Model(Section):
    n_layer: int = Size(4, description="number of blocks")
    n_head: int = Size(4, description="query heads per layer")
    n_kv_head: int | None = Size(None, description="key and value heads; a divisor of n_head (null: n_head)")
    d_model: int = Size(128, description="width of the residual stream")
    d_head: int | None = Size(None, description="width of a head (null: d_model / n_head)")
    d_mlp: int | None = Size(None, description="hidden width (null: 4 d_model; swiglu: 8/3 d_model)")
    mlp: Literal["gelu", "gelu_tanh", "relu2", "swiglu", "none"] = Key(
        "gelu", description="activation; gelu_tanh: as GPT-2 has it; none: attention only"
    )
    norm: Literal["layernorm", "rmsnorm"] = Key("layernorm", description="norm in front of each part")
    norm_gain: bool = Key(True, description="learned gains in the norms")
    norm_eps: float | None = Key(
        None, ge=1e-12, le=1e-2, description="added to the variance (null: 1e-5; rmsnorm: float32's, 1.2e-7)"
    )
    position: Literal["rotary", "learned"] = Key("rotary", description="how positions enter")
    rope_theta: float | None = Key(None, gt=1, description="base of the rotary wavelengths (null: 10000)")
    context_length: int = Key(64, ge=MIN_CONTEXT, le=2**20, description="tokens in a window")
    backend: Backend = Key("auto", description="T x T matrix, fused kernels, row blocks; auto: mostly sdpa")
    dropout: float = Key(0.0, ge=0, lt=1, description="on embedding, attention weights, residual branches")
    bias: bool = Key(False, description="biases in linear layers and layernorms")
    tie_embeddings: bool = Key(False, description="output layer and token embedding share weights")
    qk_norm: bool = Key(False, description="queries and keys to root mean square 1, per head")
    qk_gain: float | None = Key(None, ge=1e-4, le=1000, description="factor on both after qk_norm (null: 1)")
    scale: Literal["sqrt", "none", "linear"] = Key(
        "sqrt", description="scores over sqrt(d_head), 1 or d_head"
    )
    qk: Literal["separate", "tied", "identity"] = Key(
        "separate", description="tied: W_k is W_q; identity: queries and keys are what the layer reads"
    )
    value: Literal["project", "key", "identity"] = Key(
        "project", description="key: values are the projected keys; identity: what the layer reads"
    )
    window: int | None = Size(None, description="a token sees the last so many, itself included (null: all)")
    sink: Literal["none", "zero", "learned"] = Key(
        "none", description="a logit per head in the softmax's denominator that no value answers to"
    )
    gate: bool = Key(False, description="each head's output times a sigmoid of the token, per head")
    logit_softcap: float = Key(0.0, ge=0, le=1e6, description="logits become c tanh(z / c); 0: off")
    embed_norm: bool = Key(False, description="embedding to root mean square 1")
    init: Literal["gpt2", "zero_residual"] = Key(
        "gpt2", description="of N(0, 0.02), or blocks that start as identity"
    )
    init_from: str | None = Key(
        None,
        min_length=1,
        description="whose weights are taken over: a run folder, a Hugging Face folder or a GGUF file",
    )

    @model_validator(mode="after")
    def _check(self) -> "Model":
        if self.d_head is None and self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} is no multiple of n_head {self.n_head}; set d_head")
        self._fill("d_head", self.d_model // self.n_head)
        self._fill("n_kv_head", self.n_head)
        self._fill("norm_eps", 2.0**-23 if self.norm == "rmsnorm" else 1e-5)
        if self.n_head % (self.n_kv_head or 1):
            raise ValueError(f"n_head {self.n_head} is no multiple of n_kv_head {self.n_kv_head}")
        if self.position == "rotary" and (self.d_head or 0) % 2:
            raise ValueError(f"position rotary needs an even d_head; d_head is {self.d_head}")
        self._fill("rope_theta", 10000.0, self.position == "rotary", "model.position rotary")
        d_mlp = -(-self.d_model // 3) * 8 if self.mlp == "swiglu" else 4 * self.d_model
        self._fill("d_mlp", d_mlp, self.mlp != "none", "an MLP")
        self._fill("qk_gain", 1.0, self.qk_norm, "model.qk_norm true")
        if self.window and self.window >= self.context_length:
            raise ValueError(f"window {self.window} is no narrower than context_length {self.context_length}")
        heads = f"n_head {self.n_head}, n_kv_head {self.n_kv_head}, d_head {self.d_head}"
        for key, needs_width in (("qk", self.qk == "identity"), ("value", self.value == "identity")):
            if needs_width and self.n_head * (self.d_head or 0) != self.d_model:
                raise ValueError(f"{key} identity needs n_head d_head = d_model {self.d_model}; got {heads}")
        if (self.qk != "separate" or self.value == "identity") and self.n_kv_head != self.n_head:
            asked = f"qk {self.qk}" if self.qk != "separate" else "value identity"
            raise ValueError(f"{asked} needs as many key heads as query heads; got {heads}")
        if self.init == "zero_residual" and self.tie_embeddings:
            raise ValueError("init zero_residual starts with a zero head: it needs tie_embeddings false")
        return self


class Optimizer(Section):
    name: Literal["adamw", "muon"] = Key("adamw", description="muon: on matrices of blocks; AdamW: the rest")
    lr: float = Key(1e-3, gt=0, description="peak rate of AdamW")
    beta1: float = Key(0.9, ge=0, lt=1, description="AdamW: decay of the mean")
    beta2: float = Key(0.99, ge=0, lt=1, description="AdamW: decay of the mean square")
    weight_decay: float = Count(0.0, description="AdamW: decoupled decay of matrices")
    muon_lr: float | None = Key(None, gt=0, description="peak rate of Muon (null: 0.02)")
    muon_momentum: float | None = Key(None, ge=0, lt=1, description="Nesterov momentum (null: 0.95)")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Key(
        "cosine", description="shape after the warm-up; linear and wsd: constant, then down to 0"
    )
    warmup_steps: int = Count(100, description="steps over which the rate rises linearly")
    final_lr: float | None = Key(None, ge=0, le=1, description="cosine: last rate over peak (null: 0.1)")
    decay_share: float | None = Key(
        None, ge=0, le=1, description="linear, wsd: share of steps that go down (null: 0.4, 0.2)"
    )

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        self._fill("muon_lr", 0.02, self.name == "muon", "optimizer.name muon")
        self._fill("muon_momentum", 0.95, self.name == "muon", "optimizer.name muon")
        self._fill("final_lr", 0.1, self.schedule == "cosine", "optimizer.schedule cosine")
        decays = self.schedule in ("linear", "wsd")
        decay_share = 0.4 if self.schedule == "linear" else 0.2
        self._fill("decay_share", decay_share, decays, "optimizer.schedule linear or wsd")
        return self


class Train(Section):
    steps: int = Key(1000, ge=1, le=10**12, description="optimizer steps")
    batch_size: int = Size(32, description="sequences per micro-step and rank")
    grad_accum: int = Size(1, description="micro-steps per optimizer step")
    ranks: int | None = Size(None, description="processes that share a step (null: those of torchrun)")
    parallel: Literal["ddp", "fsdp"] = Key(
        "ddp", description="how they share a model: a whole copy each, or (fully_shard) a part each"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Key(
        "fp32", description="of the linear layers; the rest is fp32. fp16: with loss scaling"
    )
    compile: bool = Key(False, description="torch.compile the training step's forward pass")
    clip: float = Count(1.0, description="largest norm of the gradient; 0: off")


class Eval(Section):
    every: int = Count(250, description="steps between evaluations, first and last included; 0: never")
    tokens: int = Count(0, description="validation tokens used, evenly spread; 0: all of them")


class Probe(Section):
    every: int = Count(100, description="steps between probes, first and last included; 0: never")
    sequences: int = Size(16, description="sequences of each probe")


class Alarm(Section):
    entropy: float = Key(
        0.05,
        ge=0,
        lt=1,
        description="probes warn of a layer whose mean entropy_normalized is below it (entropy collapse); "
        "0, or probe.every 0: never",
    )
    max_logit: float = Count(
        1000.0,
        description="probes warn of a layer where a max_logit is above it (logit explosion); 0: never, too",
    )


class Checkpoint(Section):
    every: int = Count(500, description="steps between checkpoints, beside first and last; 0: only those")
    log_spaced: bool = Key(False, description="also at 0, 1, 2, 4 ... 512, 1024, 1536 ..., kept for good")
    keep_last: int = Size(3, description="newest checkpoints kept")
    keep_best: bool = Key(True, description="also save and keep the lowest validation loss")


class Log(Section):
    every: int = Size(10, description="steps between train records")
    wandb: Literal["auto", "online", "offline", "disabled"] = Key(
        "auto", description="Weights & Biases; auto: online where an API key is at hand, else offline"
    )
    project: str = Key("headlight", min_length=1, description="Weights & Biases project")
    group: str | None = Key(None, description="Weights & Biases group, such as the seeds of one setting")
    image_every: int | None = Key(
        None, ge=0, description="steps between heat maps there (null: a tenth of the run); 0: never"
    )


class Config(Section):
    run: Run = Key(default_factory=Run)
    data: Data = Key(default_factory=Data)
    model: Model = Key(default_factory=Model)
    optimizer: Optimizer = Key(default_factory=Optimizer)
    train: Train = Key(default_factory=Train)
    eval: Eval = Key(default_factory=Eval)
    probe: Probe = Key(default_factory=Probe)
    alarm: Alarm = Key(default_factory=Alarm)
    checkpoint: Checkpoint = Key(default_factory=Checkpoint)
    log: Log = Key(default_factory=Log)

    @model_validator(mode="after")
    def _check(self) -> "Config":
        self.log._fill("image_every", -(-self.train.steps // 10))
        if self.data.tokenizer == "hf" and self.model.init_from is None:
            raise ValueError("data.tokenizer hf is that of model.init_from, which is not set")
        return self

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.train.batch_size * self.train.grad_accum * (self.train.ranks or 1)

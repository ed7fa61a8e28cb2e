"""Every key of a run: type, default, meaning. Cross-checks name the key, what was asked and what is possible.

A key that would have no effect beside the others is refused rather than ignored; a section that `every: 0`
switches off keeps its other keys. Keys left at null are filled in with what they resolve to, so that
`runs/X/config.yaml` is complete.
"""

from functools import partial
from typing import Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic import Field as Key

Source = Literal["shakespeare", "text", "repeats", "backcopy"]
TEXTS: set[Source] = {"shakespeare", "text"}
Backend = Literal["auto", "naive", "sdpa", "blocks"]
MIN_CONTEXT = 17  # the shortest context that holds BOS and a probe block of 8 tokens twice


class Section(BaseModel):
    """Base of all sections: unknown keys are errors; values change no more once nulls are filled."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps: yes` would count as 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        parts = value.values() if get_origin(annotation) is dict and isinstance(value, dict) else [value]
        if annotation is not bool and any(isinstance(part, bool) for part in parts):
            raise ValueError(f"true or false has no meaning here; got {value}")
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
        "shakespeare", description="nine plays (embedded), text files, random repeats, Bigram-Backcopy"
    )
    stages: list[Stage] = Key(
        [], description='mixtures in turn [{"until": 9, "weights": {"repeats": 1}}, {"weights": {"text": 1}}]'
    )
    path: str | None = Key(None, description="source text: a file or a glob of files, UTF-8")
    tokenizer: Literal["char", "byte"] = Key("char", description="a token per character, or per UTF-8 byte")
    bos: bool = Key(True, description="put the token BOS in front of every window")
    val_fraction: float | None = Key(None, gt=0, lt=1, description="last share, for validation (null: 0.1)")
    cache_dir: str = Key("cache", min_length=1, description="folder of the memory-mapped tokens")

    @model_validator(mode="after")
    def _check(self) -> "Data":
        self._fill("path", None, "text" in self.sources, "data.source text")
        if "text" in self.sources and not self.path:
            raise ValueError("source text needs data.path, a text file or a glob such as 'books/*.txt'")
        self._fill("val_fraction", 0.1, bool(TEXTS.intersection(self.sources)), "a text source")
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
    d_mlp: int | None = Size(None, description="hidden width of the MLP (null: 4 d_model)")
    mlp: Literal["gelu", "relu2", "none"] = Key("gelu", description="activation; none: attention only")
    norm: Literal["layernorm", "rmsnorm"] = Key("layernorm", description="norm in front of each part")
    norm_gain: bool = Key(True, description="learned gains in the norms")
    position: Literal["rotary", "learned"] = Key("rotary", description="how positions enter")
    rope_theta: float | None = Key(None, gt=1, description="base of the rotary wavelengths (null: 10000)")
    context_length: int = Key(64, ge=MIN_CONTEXT, le=2**20, description="tokens in a window")
    backend: Backend = Key(
        "auto", description="T x T matrix, fused kernels, blocks of rows; auto: sdpa mostly"
    )
    dropout: float = Key(0.0, ge=0, lt=1, description="on embedding, attention weights, residual branches")
    bias: bool = Key(False, description="biases in linear layers and layernorms")
    tie_embeddings: bool = Key(False, description="output layer and token embedding share weights")
    qk_norm: bool = Key(False, description="queries and keys to root mean square 1, per head")
    qk_gain: float | None = Key(None, gt=0, le=1000, description="factor on both after qk_norm (null: 1)")
    sink: Literal["none", "zero", "learned"] = Key(
        "none", description="a logit per head in the softmax's denominator that no value answers to"
    )
    gate: bool = Key(False, description="each head's output times a sigmoid of the token, per head")
    logit_softcap: float = Count(0.0, description="logits become c tanh(z / c); 0: off")
    embed_norm: bool = Key(False, description="embedding to root mean square 1")
    init: Literal["gpt2", "zero_residual"] = Key(
        "gpt2", description="of N(0, 0.02), or blocks that start as identity"
    )

    @model_validator(mode="after")
    def _check(self) -> "Model":
        if self.d_head is None and self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} is no multiple of n_head {self.n_head}; set d_head")
        self._fill("d_head", self.d_model // self.n_head)
        self._fill("n_kv_head", self.n_head)
        if self.n_head % (self.n_kv_head or 1):
            raise ValueError(f"n_head {self.n_head} is no multiple of n_kv_head {self.n_kv_head}")
        if self.position == "rotary" and (self.d_head or 0) % 2:
            raise ValueError(f"position rotary needs an even d_head; d_head is {self.d_head}")
        self._fill("rope_theta", 10000.0, self.position == "rotary", "model.position rotary")
        self._fill("d_mlp", 4 * self.d_model, self.mlp != "none", "an MLP")
        self._fill("qk_gain", 1.0, self.qk_norm, "model.qk_norm true")
        if self.init == "zero_residual" and self.tie_embeddings:
            raise ValueError("init zero_residual starts with a zero head: it needs tie_embeddings false")
        return self


class Optimizer(Section):
    name: Literal["adamw", "muon"] = Key(
        "adamw", description="muon: on the blocks' matrices; AdamW on the rest"
    )
    lr: float = Key(1e-3, gt=0, description="peak rate of AdamW")
    beta1: float = Key(0.9, ge=0, lt=1, description="AdamW: decay of the mean")
    beta2: float = Key(0.99, ge=0, lt=1, description="AdamW: decay of the mean square")
    weight_decay: float = Count(0.0, description="AdamW: decoupled decay of matrices")
    muon_lr: float | None = Key(None, gt=0, description="peak rate of Muon (null: 0.02)")
    muon_momentum: float | None = Key(None, ge=0, lt=1, description="Nesterov momentum (null: 0.95)")
    schedule: Literal["cosine", "linear"] = Key("cosine", description="shape after the warm-up")
    warmup_steps: int = Count(100, description="steps over which the rate rises linearly")
    final_lr: float | None = Key(None, ge=0, le=1, description="cosine: last rate over peak (null: 0.1)")
    decay_share: float | None = Key(None, ge=0, le=1, description="linear: share of steps to 0 (null: 0.4)")

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        self._fill("muon_lr", 0.02, self.name == "muon", "optimizer.name muon")
        self._fill("muon_momentum", 0.95, self.name == "muon", "optimizer.name muon")
        self._fill("final_lr", 0.1, self.schedule == "cosine", "optimizer.schedule cosine")
        self._fill("decay_share", 0.4, self.schedule == "linear", "optimizer.schedule linear")
        return self


class Train(Section):
    steps: int = Key(1000, ge=1, description="optimizer steps")
    batch_size: int = Size(32, description="sequences per micro-step")
    grad_accum: int = Size(1, description="micro-steps per optimizer step")
    precision: Literal["fp32", "bf16"] = Key("fp32", description="of the linear layers; the rest is fp32")
    clip: float = Count(1.0, description="largest norm of the gradient; 0: off")


class Eval(Section):
    every: int = Count(250, description="steps between evaluations, first and last included; 0: never")
    tokens: int = Count(0, description="validation tokens used, evenly spread; 0: all of them")


class Probe(Section):
    every: int = Count(100, description="steps between probes, first and last included; 0: never")
    sequences: int = Size(16, description="sequences of each probe")


class Checkpoint(Section):
    every: int = Count(
        500, description="steps between checkpoints, besides the first and last; 0: only those"
    )
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
    checkpoint: Checkpoint = Key(default_factory=Checkpoint)
    log: Log = Key(default_factory=Log)

    @model_validator(mode="after")
    def _check(self) -> "Config":
        self.log._fill("image_every", -(-self.train.steps // 10))
        return self

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.train.batch_size * self.train.grad_accum

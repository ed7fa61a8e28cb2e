"""Every key of a run: type, default, meaning. Cross-checks name the key, what was asked and what is possible.

A key that would have no effect beside the others is refused rather than ignored; keys left at `None` are filled in
with what they resolve to, so that `runs/X/config.yaml` is complete.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MIN_CONTEXT = 17  # the shortest context that holds BOS and a probe block of 8 tokens twice


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def _resolve(self, key: str, value: Any) -> None:
        """Fill in `key` where it was left at None."""
        if getattr(self, key) is None:
            object.__setattr__(self, key, value)

    def _only_with(self, key: str, used: bool, condition: str, default: Any) -> None:
        """`key` has an effect only under `condition`: give it its default there, refuse it elsewhere."""
        if used:
            self._resolve(key, default)
        elif getattr(self, key) is not None:
            raise ValueError(f"{key} is used with {condition} only: set it to null, or set {condition}")


class Run(Section):
    """The run folder and the seed."""

    dir: str = Field("runs/default", min_length=1, description="folder that receives the run")
    seed: int = Field(
        1, ge=0, description="seed of initialisation, data order, dropout, evaluation and probes"
    )
    overwrite: bool = Field(False, description="empty a run folder that is in use and start afresh")


class Data(Section):
    """What is read, and how it becomes tokens."""

    source: Literal["shakespeare", "text", "repeats"] = Field(
        "shakespeare", description="nine plays (embedded), text files, or random blocks that repeat"
    )
    path: str | None = Field(None, description="file or glob of UTF-8 text, for source text")
    tokenizer: Literal["char", "byte"] = Field(
        "char", description="one token per character or per UTF-8 byte"
    )
    bos: bool = Field(True, description="put the token BOS in front of every window")
    val_fraction: float | None = Field(
        None, gt=0, lt=1, description="last part of the text, by position, kept for validation (null: 0.1)"
    )
    cache_dir: str = Field("cache", min_length=1, description="folder of the memory-mapped tokens")

    @model_validator(mode="after")
    def _check(self) -> "Data":
        self._only_with("path", self.source == "text", "data.source text", None)
        if self.source == "text" and not self.path:
            raise ValueError("data.source text needs data.path, a text file or a glob such as 'books/*.txt'")
        self._only_with("val_fraction", self.source != "repeats", "a text source", 0.1)
        return self


class Model(Section):
    """The transformer."""

    n_layer: int = Field(4, ge=1, description="number of blocks")
    n_head: int = Field(4, ge=1, description="query heads per layer")
    n_kv_head: int | None = Field(None, ge=1, description="key and value heads, each shared (null: n_head)")
    d_model: int = Field(128, ge=1, description="width of the residual stream")
    d_head: int | None = Field(None, ge=1, description="width of a head (null: d_model / n_head)")
    d_mlp: int | None = Field(None, ge=1, description="hidden width of the MLP (null: 4 d_model)")
    mlp: Literal["gelu", "relu2", "none"] = Field("gelu", description="activation; none: attention only")
    norm: Literal["layernorm", "rmsnorm"] = Field(
        "layernorm", description="normalisation in front of each part"
    )
    norm_gain: bool = Field(True, description="learned gain in the norms (and bias, with layernorm and bias)")
    position: Literal["rotary", "learned"] = Field("rotary", description="how positions enter")
    rope_theta: float | None = Field(None, gt=1, description="base of the rotary wavelengths (null: 10000)")
    context_length: int = Field(64, ge=MIN_CONTEXT, description="tokens in a window")
    backend: Literal["auto", "naive", "sdpa", "blocks"] = Field(
        "auto", description="attention: T x T matrix, fused kernels, blocks of rows; auto: the best that fits"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="on embedding, attention weights and residual branches"
    )
    bias: bool = Field(False, description="biases in the linear layers and layernorms")
    tie_embeddings: bool = Field(False, description="the output head shares the token embedding")
    qk_norm: bool = Field(False, description="normalise queries and keys to root mean square 1, per head")
    qk_gain: float | None = Field(None, gt=0, description="factor on both after qk_norm (null: 1)")
    logit_softcap: float = Field(0.0, ge=0, description="logits become c tanh(z / c); 0: off")
    embed_norm: bool = Field(False, description="normalise the embedding to root mean square 1")
    init: Literal["gpt2", "zero_residual"] = Field(
        "gpt2",
        description="gpt2: N(0, 0.02), residual ones / sqrt(2 n_layer); zero_residual: those 0, see docs",
    )

    @model_validator(mode="after")
    def _check(self) -> "Model":
        if self.d_head is None and self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_head {self.n_head}; set d_head")
        self._resolve("d_head", self.d_model // self.n_head)
        self._resolve("n_kv_head", self.n_head)
        assert self.d_head is not None and self.n_kv_head is not None
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.position == "rotary" and self.d_head % 2:
            raise ValueError(f"position rotary needs an even d_head; d_head is {self.d_head}")
        self._only_with("rope_theta", self.position == "rotary", "model.position rotary", 10000.0)
        self._only_with("d_mlp", self.mlp != "none", "an MLP", 4 * self.d_model)
        self._only_with("qk_gain", self.qk_norm, "model.qk_norm true", 1.0)
        if self.init == "zero_residual" and self.tie_embeddings:
            raise ValueError("init zero_residual starts with a zero head, so it needs tie_embeddings false")
        return self


class Optimizer(Section):
    """Update rule and learning rate."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon for the matrices of the blocks, else AdamW"
    )
    lr: float = Field(1e-3, gt=0, description="peak rate of AdamW")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW, decay of the mean")
    beta2: float = Field(0.99, ge=0, lt=1, description="AdamW, decay of the mean square")
    weight_decay: float = Field(0.0, ge=0, description="decoupled decay of all matrices that AdamW trains")
    muon_lr: float | None = Field(None, gt=0, description="peak rate of Muon (null: 0.02)")
    muon_momentum: float | None = Field(
        None, ge=0, lt=1, description="Nesterov momentum of Muon (null: 0.95)"
    )
    schedule: Literal["cosine", "linear"] = Field(
        "cosine", description="after warm-up: cosine to final_lr, or constant and then linear to 0"
    )
    warmup_steps: int = Field(100, ge=0, description="steps over which the rate rises linearly")
    final_lr: float | None = Field(
        None, ge=0, le=1, description="cosine: last rate over peak rate (null: 0.1)"
    )
    decay_share: float | None = Field(
        None, ge=0, le=1, description="linear: last share of the steps (null: 0.4)"
    )

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        self._only_with("muon_lr", self.name == "muon", "optimizer.name muon", 0.02)
        self._only_with("muon_momentum", self.name == "muon", "optimizer.name muon", 0.95)
        self._only_with("final_lr", self.schedule == "cosine", "optimizer.schedule cosine", 0.1)
        self._only_with("decay_share", self.schedule == "linear", "optimizer.schedule linear", 0.4)
        return self


class Train(Section):
    """The loop."""

    steps: int = Field(1000, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="sequences per micro-step")
    grad_accum: int = Field(1, ge=1, description="micro-steps per optimizer step")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16: linear layers in bfloat16, the rest in float32"
    )
    clip: float = Field(1.0, ge=0, description="largest norm of the gradient; 0: off")


class Eval(Section):
    """Loss on the validation part."""

    every: int = Field(250, ge=0, description="steps between evaluations, also first and last; 0: never")
    tokens: int = Field(0, ge=0, description="validation tokens used, evenly spread; 0: all of them")


class Probe(Section):
    """Attention statistics of every head on fixed probe sequences."""

    every: int = Field(100, ge=0, description="steps between probes, also first and last; 0: off")
    sequences: int = Field(16, ge=1, description="sequences of each probe")


class Checkpoint(Section):
    """What is kept for resuming and for looking back."""

    every: int = Field(
        500, ge=0, description="steps between checkpoints; 0: none but the last and those below"
    )
    log_spaced: bool = Field(
        False, description="also at 0, 1, 2, 4 ... 512 and then every 512, kept for good"
    )
    keep_last: int = Field(3, ge=1, description="newest checkpoints kept")
    keep_best: bool = Field(True, description="also save and keep the one with the lowest validation loss")


class Log(Section):
    """Records in metrics.jsonl."""

    every: int = Field(10, ge=1, description="steps between train records")


class Config(Section):
    """A run."""

    run: Run = Field(default_factory=Run)
    data: Data = Field(default_factory=Data)
    model: Model = Field(default_factory=Model)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    train: Train = Field(default_factory=Train)
    eval: Eval = Field(default_factory=Eval)
    probe: Probe = Field(default_factory=Probe)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    log: Log = Field(default_factory=Log)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.train.batch_size * self.train.grad_accum

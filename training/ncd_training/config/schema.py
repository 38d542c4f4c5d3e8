"""Everything a run can be told, as a frozen, typed tree. `resolve.py` fills it in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ncd_serve.preprocess import PreprocessSpec

# What a branch takes its pseudo labels from: whole images, or their parts.
BranchKind = Literal["global", "local"]
HeadKind = Literal["separate", "joint", "open_world"]
HeadForm = Literal["linear", "cosine", "centres"]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Section):
    """Which images, and how they are prepared."""

    dataset: str | None = None  # a named dataset, or the user's own folders:
    root: Path | None = None
    labelled: Path | None = None
    unlabelled: Path | None = None
    manifest: Path | None = None  # or a CSV file that lists them
    strict: bool = False  # an image that cannot be used is an error; False: it is left out
    # Number of clusters; auto: estimated first; None: the dataset knows it.
    novel_classes: Annotated[int, Field(ge=2)] | Literal["auto"] | None = None
    resolution: int = Field(224, ge=16)
    resize: int = Field(256, ge=16)
    augmentation: Literal["crop", "glyph", "cifar10", "cifar100", "moco"] = "crop"
    workers: int = Field(2, ge=0)
    cache_views: int = Field(0, ge=0)  # trunk maps of so many views of each image are computed once; 0: none
    cache_dir: Path | None = None  # kept for other runs; None: in the run directory, removed when the run is done

    @property
    def preprocess(self) -> PreprocessSpec:
        """How images are prepared for evaluation and serving."""
        return PreprocessSpec(resolution=self.resolution, resize=self.resize)


class ModelConfig(Section):
    """Trunk, branches and memories."""

    trunk: str = "resnet50"
    weights: Path | None = None  # file or run directory that trunk and tail start from; None: random
    # Normalisation of pixels in 0 to 1; None: the weight file's own if it says, else the trunk's.
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    branches: Literal["global", "local", "global+global", "local+local", "global+local"] = "global+local"
    # joint: the known head also has the novel classes (RankStat's incremental head), so it can tell known from new.
    # open_world: one head for known and novel classes, for piles that hold both.
    heads: HeadKind = "separate"
    # cosine: heads compare directions, logits 10 cos (open world's first regulariser).
    # centres: the cluster head measures distances to centres in a space of as many dimensions (DTC).
    head_form: HeadForm = "linear"
    dictionary_size: int = Field(2048, ge=1)  # e
    dictionary_sampling: Literal["random", "all", "cam"] = "random"
    dictionary_border: bool = True  # False: the outermost parts of maps larger than 4x4 are left out
    bank_size: int = Field(2048, ge=1)  # T

    @property
    def branch_kinds(self) -> list[BranchKind]:
        """The kind of each branch; the first is the one that is exported."""
        return ["global" if kind == "global" else "local" for kind in self.branches.split("+")]


class MethodConfig(BaseModel):
    """Name of the discovery method, and the method's own settings, which it declares and checks itself."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    name: str = "dual"

    @property
    def own(self) -> dict[str, Any]:
        """Settings of the method itself."""
        return dict(self.model_extra or {})


class PseudoLabelConfig(Section):
    """How pairs of unlabelled images are judged."""

    score: Literal["ranking", "cosine"] = "ranking"
    hard: bool = False
    global_top_k: int = Field(5, ge=1)
    local_top_k: int = Field(30, ge=1)
    cosine_threshold: float = 0.9
    positives: Literal["own", "global", "local"] = "own"  # another source: the single-branch ablation
    negatives: Literal["own", "global", "local"] = "own"

    def sources(self, kind: BranchKind) -> tuple[BranchKind, BranchKind]:
        """What tells a branch of this kind which images should agree, and what tells it which should differ."""
        return kind if self.positives == "own" else self.positives, kind if self.negatives == "own" else self.negatives


class LossConfig(Section):
    """The terms of the objective."""

    pairwise: bool = True
    distillation: bool = True
    cross_entropy: bool = True
    consistency: bool = True
    divergence: Literal["symmetric_kl", "jensen_shannon"] = "symmetric_kl"
    temperature: float = Field(0.07, gt=0)  # tau
    bank_positive: bool = False  # the image's own other view joins the bank, as in the released code
    # mean: both heads, all images, mean over classes (lambda was tuned on it). paper: the known head on labelled and
    # the cluster head on unlabelled images, sum over classes.
    consistency_form: Literal["mean", "paper"] = "mean"
    consistency_weight: float = Field(50.0, ge=0)  # lambda
    ramp_epochs: int = Field(150, ge=1)  # r
    balance_weight: float = Field(0.0, ge=0)  # mean prediction towards uniform (open world's second regulariser)
    joint_weight: float = Field(0.05, ge=0)  # of the joint head's cross entropy on unlabelled images


class SelfLabelConfig(Section):
    """Cluster heads that start from a clustering and are taught its refinements; not in the paper."""

    weight: float = Field(0.0, ge=0)  # of the term; 0: neither start nor term
    refresh_epochs: int = Field(2, ge=1)
    views: int = Field(4, ge=1)  # of each image, whose features are averaged
    shrinkage: float = Field(0.1, gt=0, le=1)
    dims: int = Field(128, ge=1)
    starts: int = Field(10, ge=1)
    temperature: float = Field(0.1, gt=0)
    target_temperature: float = Field(0.05, gt=0)


class CompatConfig(Section):
    """Where the released code departs from the paper, for study."""

    local_head_input: Literal["own", "global"] = "own"  # global: later branches' heads read the first one's embedding
    local_views: Literal["two", "one"] = "two"  # one: later branches' pairs compare the first view with itself
    trunk_batch_norm: Literal["eval", "train"] = "eval"  # train: the frozen trunk's statistics drift


class StageConfig(Section):
    """A stage before the branches part; 0 epochs: left out."""

    epochs: int = Field(0, ge=0)
    learning_rate: float = Field(0.1, gt=0)
    batch: int = Field(128, ge=1)


class PretrainConfig(Section):
    """Weights from images alone (`ncd-serve pretrain`): RotNet's settings; the recipe `moco` has MoCo v2's."""

    method: Literal["rotnet", "moco"] = "rotnet"
    epochs: int = Field(200, ge=1)
    batch: int = Field(128, ge=2)
    learning_rate: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, gt=0, lt=1)
    nesterov: bool = True
    weight_decay: float = Field(5e-4, ge=0)
    schedule: Literal["steps", "cosine"] = "steps"
    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)  # shares of all epochs: 60, 120 and 160 of 200
    decay: float = Field(0.2, gt=0)  # after each milestone
    held_out: float = Field(0.05, gt=0, lt=1)  # share of the images that chooses RotNet's best epoch
    queue: int = Field(65536, ge=1)  # keys that MoCo compares with; never more than half of the images
    key_size: int = Field(128, ge=1)
    key_momentum: float = Field(0.999, ge=0, lt=1)
    temperature: float = Field(0.2, gt=0)


class EstimateConfig(Section):
    """How the number of novel classes is estimated (`ncd-serve estimate-k`); see class_number.py."""

    estimator: Literal["balanced", "dtc", "gcd"] = "balanced"
    draws: int = Field(9, ge=1)  # of balanced: halves of the known classes that are held back, one after the other
    # What follows is for the published estimators.
    most: int | None = Field(None, ge=2)  # numbers up to this are tried; None: 100, or half as many as there are images
    probe_share: float = Field(0.25, gt=0, lt=1)  # of the known classes, held back from training by dtc
    anchor_share: float = Field(0.6, gt=0, lt=1)  # of the probe classes, told to dtc
    small_cluster: float = Field(0.01, ge=0, lt=1)  # tau of dtc: share of the largest that a cluster must exceed
    silhouette_images: int = Field(2000, ge=3)
    starts: int = Field(5, ge=1)  # of every clustering


class OptimConfig(Section):
    """Gradient descent with step decay."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    epochs: int = Field(200, ge=0)
    learning_rate: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, gt=0, lt=1)
    weight_decay: float = Field(1e-4, ge=0)
    milestones: tuple[int, ...] = (170,)
    decay: float = Field(0.1, gt=0)  # after each milestone
    labelled_batch: int = Field(128, ge=0)  # 0: an epoch is a pass over the unlabelled images alone
    unlabelled_batch: int = Field(64, ge=2)
    batch_by_size: bool = False  # both together are dealt out anew, by how many images of each kind there are
    mixed_precision: bool = True  # on CUDA
    compile: bool = False  # torch.compile the branches: slow to start, then faster
    onnx_trunk: bool = False  # on a CPU the frozen trunk runs in ONNX Runtime, after some seconds of preparation
    seed: int = Field(0, ge=0, lt=2**31)  # what scikit-learn takes, with room to count on


class ReportConfig(Section):
    """What is left for people to look at; changes nothing of the training."""

    tsne_epochs: tuple[Annotated[int, Field(ge=-1)], ...] = (0, -1)  # embeddings drawn at: 0 the start, -1 the end
    tensorboard: bool = False


class TrainConfig(Section):
    """A whole run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    pseudo_labels: PseudoLabelConfig = PseudoLabelConfig()
    loss: LossConfig = LossConfig()
    self_labels: SelfLabelConfig = SelfLabelConfig()
    compat: CompatConfig = CompatConfig()
    rotations: StageConfig = StageConfig()  # self-supervision of trunk and tail, when there are no weights to load
    from_labels: StageConfig = StageConfig()  # instead of self-supervision: known classes teach trunk and tail
    supervised: StageConfig = StageConfig()  # cross entropy on the known classes, trunk frozen
    similarity: StageConfig = StageConfig(learning_rate=1e-3, batch=100)  # which labelled pairs are alike (kcl, mcl)
    optim: OptimConfig = OptimConfig()
    pretrain: PretrainConfig = PretrainConfig()
    report: ReportConfig = ReportConfig()
    estimate: EstimateConfig = EstimateConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        if self.data.cache_views == 1:
            raise ValueError("data.cache_views must be 0, or at least 2: a step compares two views of an image")
        if self.compat.trunk_batch_norm == "train" and self.data.cache_views:
            raise ValueError("compat.trunk_batch_norm=train changes the trunk, so data.cache_views must be 0")
        if self.compat.trunk_batch_norm == "train" and self.optim.onnx_trunk:
            raise ValueError("compat.trunk_batch_norm=train changes the trunk, so optim.onnx_trunk must be false")
        if self.self_labels.weight and (self.model.heads == "open_world" or self.model.head_form != "linear"):
            raise ValueError("self_labels.weight needs linear cluster heads of the novel classes alone")
        return self

    def to_toml(self) -> str:
        """The resolved configuration as a file that `--config` reads back."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

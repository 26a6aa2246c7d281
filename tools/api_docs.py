"""The API reference, made of the docstrings: `python tools/api_docs.py FOLDER` (make docs). Needs pdoc. Modules that
need PyTorch or transformers have pages where these are installed."""

import sys
from importlib import import_module
from pathlib import Path

import pdoc

# What users import. pagedkv.integrations.vllm and .sglang have no functions to call, and need their engines.
MODULES = (
    "pagedkv",
    "pagedkv.ops",
    "pagedkv.engine",
    "pagedkv.replicas",
    "pagedkv.torch",
    "pagedkv.compat.flash_attn",
    "pagedkv.compat.flash_attn_3",
    "pagedkv.compat.flashinfer",
    "pagedkv.compat.nanovllm",
    "pagedkv.compat.vllm_ops",
    "pagedkv.integrations.transformers",
)
NEED_NOTHING = MODULES[:4]  # beside what pip installs with pagedkv


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = []
    for name in MODULES:
        try:
            module = import_module(name)
        except ImportError as error:
            if name in NEED_NOTHING:
                raise
            print(f"no page of {name}: {error}", file=sys.stderr)
            continue
        for each in module.__all__:  # pdoc sees what is there, and some names come at first use
            getattr(module, each)
        found.append(name)
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*found, output_directory=Path(sys.argv[1]))


if __name__ == "__main__":
    main()

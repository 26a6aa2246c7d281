"""The API reference, made of the docstrings: `python tools/api_docs.py FOLDER` (make docs). Needs pdoc."""

import sys
from importlib import import_module
from pathlib import Path

import pdoc

# What users import. pagedkv.integrations.vllm and .sglang have no functions to call, and need their engines.
MODULES = (
    "pagedkv",
    "pagedkv.ops",
    "pagedkv.engine",
    "pagedkv.torch",
    "pagedkv.compat.flash_attn",
    "pagedkv.compat.flash_attn_3",
    "pagedkv.compat.flashinfer",
    "pagedkv.compat.nanovllm",
    "pagedkv.compat.vllm_ops",
    "pagedkv.integrations.transformers",
)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for module in map(import_module, MODULES):
        for name in module.__all__:  # pdoc sees what is there, and some names come at first use
            getattr(module, name)
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=Path(sys.argv[1]))


if __name__ == "__main__":
    main()

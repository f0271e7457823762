"""Packaging. Exact versions that were run together are in requirements/; the bounds here are the reasons."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    source = (HERE / "megatron_grpo" / "__init__.py").read_text()
    return re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE).group(1)


INSTALL_REQUIRES = [
    "einops",  # imported by megatron-core's models, which does not declare it
    "math-verify==0.9.0",  # verdicts change between releases, rewards with them
    "megatron-core==0.19.2",  # KV cache modes, pause states, policy epochs; the platform adapter patches this release
    "msgpack",  # with pyzmq: the messages of megatron-core's inference engine, which does not declare them
    "numpy>=2",
    "omegaconf>=2.4",  # older ones pin another antlr runtime than math-verify
    "psutil",
    "pyarrow",  # Parquet prompt files
    "pydantic>=2.12",  # what the schema was written against; shared with vLLM
    "pyyaml",  # line numbers of recipe faults
    "pyzmq",
    "ray==2.60.0",  # actors and driver must run one release
    "reasoning-gym==0.1.25",  # the generators decide the problems of a seed
    "rich",
    "safetensors",
    "tensorboard",
    "tokenizers",
    "torch>=2.11",  # oldest release that was planned for; pinned exactly in requirements/
    "transformers>=5.16.1,<5.20",  # the range that vLLM 0.32 accepts too
]

EXTRAS_REQUIRE = {
    "te": ["transformer-engine[pytorch,core-cu13]>=2.9"],  # fused layers and Adam on CUDA; built against the installed torch
    "vllm": ["vllm==0.32.0"],  # the weight loader's hooks are those of this release
    "wandb": ["wandb"],
    "dev": ["hypothesis", "pytest>=8", "pytest-timeout", "pytest-xdist", "ruff"],
}

setup(
    name="megatron_grpo",
    version=version(),
    description="Asynchronous GRPO on Megatron-Core: the trainer and the generator never wait for each other's tail",
    license="Apache-2.0",
    python_requires=">=3.12",  # megatron-core 0.19 needs it
    packages=find_namespace_packages(include=["megatron_grpo", "megatron_grpo.*"]),
    package_data={"megatron_grpo": ["**/*.yaml"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["megatron-grpo = megatron_grpo.__main__:main"]},
)

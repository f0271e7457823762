"""The README as tests read it: its fenced blocks."""

import re
from dataclasses import dataclass

from tests.running import REPOSITORY

README = REPOSITORY / "README.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    text: str


def blocks(language):
    return [block for block in all_blocks() if block.language == language]


def all_blocks():
    return [Block(*found.groups()) for found in _BLOCK.finditer(README.read_text())]


def file_block(name):
    """The text of the block whose first line is `# NAME`."""
    found = [block.text for block in all_blocks() if block.text.startswith(f"# {name}\n")]
    assert len(found) == 1, f"{README.name} has {len(found)} blocks that begin with '# {name}'"
    return found[0]


def write_user_task(folder):
    """The user's own environment of the README, as its reader would lay it out; returns the recipe."""
    for name in ("my_task.py", "my_task.yaml"):
        (folder / name).write_text(file_block(name))
    (folder / "recipes").symlink_to(REPOSITORY / "recipes")
    return "my_task.yaml"


def metric_names():
    """The metric names that the README tells; `timing/train/*` stands for a family."""
    families = "train|timing|performance|efficiency|collector"
    return set(re.findall(rf"`((?:(?:{families})/|val:)[\w/*]+)`", README.read_text()))

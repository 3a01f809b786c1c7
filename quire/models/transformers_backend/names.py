"""What checkpoints call the tensors of a class, where transformers converts names and layouts while it loads.

Called by `model` and `experts`. Two kinds of conversion are known: another name, and one matrix for each expert and
projection where the class has one tensor for all. A class with any other is refused. Values only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

PLAIN = re.compile(r"[\w.\\]+")


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """The conversions of one class, from its names to the checkpoint's.

    Attributes:
        renamed: (what the class's names contain, what the checkpoint has in its place), in the order of use.
        split: what the name of a tensor of all experts ends with -> what the names of one expert's matrices end with
            in the checkpoint, "*" for its number; their rows follow each other.
        unknown: kinds of conversions that cannot be undone.
    """

    renamed: tuple[tuple[str, str], ...]
    split: tuple[tuple[str, tuple[str, ...]], ...]
    unknown: tuple[str, ...]

    def saved(self, name: str) -> str:
        """The checkpoint's name of tensor `name`."""
        for new, old in self.renamed:
            name = name.replace(new, old)
        return name

    def split_names(self, name: str, expert: int) -> list[str]:
        """The checkpoint's names of an expert's matrices, of tensor `name` of all experts; empty where it is whole."""
        for end, sources in self.split:
            if name.endswith(end):
                return [self.saved(name.removesuffix(end) + one.replace("*", str(expert))) for one in sources]
        return []


def checkpoint_names(model_type: str) -> CheckpointNames:
    """The conversions of the classes of `model_type`."""
    renamed, split, unknown = [], [], []
    for one in get_checkpoint_conversion_mapping(model_type) or []:
        sources, ends = [_plain(text) for text in one.source_patterns], [_plain(text) for text in one.target_patterns]
        is_known = None not in (*sources, *ends) and len(ends) == 1
        if is_known and type(one) is WeightRenaming and len(sources) == 1:
            renamed.append((str(ends[0]), str(sources[0])))
        elif is_known and type(one) is WeightConverter and _merges_experts(one):
            split.append((str(ends[0]), tuple(map(str, sources))))
        else:
            unknown.append(f"{type(one).__name__} of {', '.join(one.source_patterns)}")
    return CheckpointNames(tuple(reversed(renamed)), tuple(split), tuple(unknown))


def _merges_experts(one: WeightConverter) -> bool:
    kinds = [(type(step), step.dim) for step in one.operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _plain(pattern: str) -> str | None:
    """The text that a pattern stands for; None where it is a real expression."""
    text = pattern.replace("*", "")
    return pattern.replace("\\", "") if PLAIN.fullmatch(text) and not re.search(r"\\[^.]", text) else None

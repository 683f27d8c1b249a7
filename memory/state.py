"""The state of a memory, a flat dict of tensors: checks, upgrades from older versions, and files.

Shapes: k occupied slots.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from stream_ssl.memory.admission import Totals
from stream_ssl.memory.checks import check_embeddings, check_seed
from stream_ssl.memory.columns import INTEGER_COLUMNS, Columns, Image
from stream_ssl.memory.compute import changes_memory, in_full_precision, on_host, to_host
from stream_ssl.memory.descriptors import Descriptor
from stream_ssl.memory.draws import Strata
from stream_ssl.memory.duplicates import Duplicates
from stream_ssl.memory.eviction.base import Policy, described
from stream_ssl.memory.shares import Holdings, ProducerNames
from stream_ssl.memory.slots import Slots

if TYPE_CHECKING:
    from stream_ssl.memory.memory import WorkingMemory
    from stream_ssl.memory.near_duplicates import NearDuplicates

VERSION = 4
"""The version of the state. Raise it when an older reader can no longer read the state.

Versions from 2 on are read too. Version 2 has no counts of draws, and version 3 has no producers. A
description may gain entries within a version, because a reader compares only entries that both
sides have.
"""

State = dict[str, Tensor]

IMAGES = "columns.images"

ROW_TYPES = (torch.float32, torch.float64)
"""The types of embeddings and descriptors, which a memory may convert."""

NO_MEMORY = re.compile("out of memory|can't allocate memory", re.IGNORECASE)
"""The texts of torch's errors if a device lacks memory."""

ADDRESS = re.compile(r"<(\S+) object at 0x[0-9a-f]+>|( at 0x[0-9a-f]+)", re.IGNORECASE)
"""The address of an object in a repr, which differs between processes."""


def part(state: Mapping[str, Tensor], name: str) -> State:
    """Return the entries below `name`, without the prefix.

    >>> part({"columns.ids": torch.ones(1), "counters": torch.ones(2)}, "columns")
    {'ids': tensor([1.])}
    """
    prefix = f"{name}."
    return {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}


def named(name: str, entries: State) -> State:
    """Return the entries with the prefix `name`, the inverse of `part`."""
    return {f"{name}.{key}": value for key, value in entries.items()}


def counters(capacity: int, totals: Totals) -> Tensor:
    return torch.tensor([VERSION, capacity, *astuple(totals)], dtype=torch.int64)


def totals_of(state: State) -> Totals:
    return Totals(*(int(count) for count in state["counters"][2:]))


def describe(
    policy: Policy,
    image_shape: Image | None,
    duplicates: Duplicates | None,
    descriptor: Descriptor,
) -> dict[str, Any]:
    """Return the settings of a memory that a state must match and that no tensor's shape shows.

    Args:
        policy: the policy, bound to the memory.
        image_shape: the memory's image shape.
        duplicates: the memory's test for near-duplicates.
        descriptor: the descriptor on which it counts duplicates.
    """
    description = described(policy) | {
        "descriptor": repr(descriptor),
        "duplicates": repr(duplicates),
        "image_shape": None if image_shape is None else list(image_shape),
    }
    return _without_addresses(description)


def without_address(text: str) -> str:
    """Return a repr in which a class without a repr of its own is known by its name.

    >>> without_address("Weighted([<package.Mean object at 0x7f2f00bdb350>], weights=[1.0])")
    'Weighted([Mean], weights=[1.0])'
    """
    return ADDRESS.sub(lambda found: (found[1] or "").rpartition(".")[2], text)


def _without_addresses(description: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: without_address(value) if isinstance(value, str) else value
        for name, value in description.items()
    }


def encode(description: Mapping[str, Any]) -> Tensor:
    """Return a description as JSON bytes, uint8."""
    return torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8).clone()


def decode(state: State) -> dict[str, Any]:
    """Return the description that `encode` was given, without addresses of older states.

    Raises:
        ValueError: the description is damaged.
    """
    try:
        found: dict[str, Any] = json.loads(bytes(state["description"].cpu().numpy()))
        return _without_addresses(found)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(f"its description cannot be read ({error})") from None


def upgraded(state: Mapping[str, Any]) -> State:
    """Return the state in the form of this version.

    Raises:
        ValueError: the mapping is not a memory state, or it has a later version.
    """
    for name, value in state.items():
        if isinstance(value, np.ndarray):  # as safetensors.numpy reads them
            raise ValueError(
                f"the state's {name} is an array of NumPy: pass tensors, such as torch.from_numpy "
                "gives for an array"
            )
    version = int(state["counters"][0]) if "counters" in state else 0
    if version > VERSION:
        raise ValueError(
            f"this memory state has version {version}, and this program reads up to {VERSION}: go "
            "on with the newer stream-ssl that wrote it, or with a backup from before the upgrade"
        )
    if version < 2 or not {"generator", "description"} <= set(state):
        raise ValueError(f"this is no memory state of version 2 to {VERSION}")
    state = _linear_counts_made_exact(state)
    none = torch.zeros_like(state.get("columns.ids", torch.empty(0, dtype=torch.int64)))
    if version < 4:
        state["columns.producers"] = none
    if version < 3:
        state |= {"columns.draws": none, "columns.drawn_epoch": none}
    return state


def columns_of(state: State) -> State:
    """Return the columns of a state that has the form of this version, see `upgraded`.

    Raises:
        ValueError: a column is missing, or has another number of rows or another type.
    """
    columns = part(state, "columns")
    count = len(columns.get("ids", ()))
    for name in ("embeddings", *INTEGER_COLUMNS):
        column = columns.get(name, torch.empty(0))
        due = ROW_TYPES if name == "embeddings" else (torch.int64,)
        if name not in columns or column.dtype not in due:
            raise _damaged(f"its column {name} is missing or has another type")
    for name, column in columns.items():
        if column.ndim < 1 or len(column) != count:
            raise _damaged(f"its column {name} does not have one row for each of {count} samples")
    return columns


def encode_names(names: Iterable[str]) -> Tensor:
    """Return the sorted names as JSON bytes, uint8."""
    return torch.frombuffer(bytearray(json.dumps(sorted(names)).encode()), dtype=torch.uint8)


def producer_names(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names that `encode_names` wrote into a state, or none if the state has none.

    >>> producer_names({"producer_names": encode_names(["yard", "robot"])})
    ['robot', 'yard']
    """
    if "producer_names" not in state:
        return []
    names: list[str] = json.loads(bytes(to_host(state["producer_names"]).numpy()))
    return names


def _linear_counts_made_exact(state: Mapping[str, Any]) -> State:
    """Return a state that counts again, if it has linear counts of an old version with index="ivf".

    Linear counts were approximate in that version.
    """
    said = decode(dict(state))
    if (said.get("score"), said.get("index")) == ("Linear()", "ivf"):
        kept = {name: v for name, v in state.items() if not name.startswith("eviction.")}
        exact = encode(said | {"index": "exact"})
        return kept | {"description": exact, "resharded": torch.ones(1)}
    return dict(state)


def shard_of(state: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the rank of a state, and the number of ranks."""
    rank, size = state["shard"].tolist() if "shard" in state else (0, 1)
    return rank, size


def is_resharded(state: Mapping[str, Tensor]) -> bool:
    """Return whether a policy must count again after loading this state.

    This is so for a state that was made for other ranks, or that has counts of a removed kind.
    """
    return "resharded" in state


def check_fits(
    state: State, columns: Columns, policy: Policy, description: Mapping[str, Any]
) -> None:
    """Raise ValueError unless a memory with these parts can load this state.

    The state must have the form of this version, see `upgraded`.
    """
    capacity = int(state["counters"][1])
    if capacity != columns.capacity_of_all:
        raise ValueError(
            f"the state is of capacity {capacity}, this memory of {columns.capacity_of_all}: "
            "build the memory with the state's capacity"
        )
    theirs, group = shard_of(state), columns.group
    if theirs != (group.rank, group.size):
        raise ValueError(
            f"the state is of rank {theirs[0]} of {theirs[1]}, this memory is of rank "
            f"{group.rank} of {group.size}: make it one of these ranks with "
            "stream_ssl.memory.shards.resharded"
        )
    found = decode(state)
    for name, here in description.items():
        # Older states lack some entries; shapes are checked below. The near-duplicate test may
        # differ, because it only affects later samples.
        if name not in ("image_shape", "duplicates") and found.get(name, here) != here:
            raise ValueError(
                f"the state was saved under {name} {found[name]}, this memory has {name} {here}: "
                f"build the memory with the state's {name}"
            )
    kept, ours = part(state, "columns"), columns.state(live=True)
    if set(kept) != set(ours):
        raise ValueError(
            f"the state has columns {sorted(kept)}, this memory {sorted(ours)}: "
            "build it with the state's image_shape and payload"
        )
    for name, column in ours.items():
        there = kept[name]
        converted = name in ("embeddings", "descriptors") and there.dtype in ROW_TYPES
        if there.shape[1:] != column.shape[1:] or not (converted or there.dtype == column.dtype):
            remedy = "build it with the state's dim, image_shape and payload"
            if there.shape[1:] == column.shape[1:] and not name.startswith("payload."):
                remedy = "pass the tensors with the dtypes that state_dict() gave them"
            raise ValueError(
                f"each slot's {name} in the state are {there.dtype} {tuple(there.shape[1:])}, in "
                f"this memory {column.dtype} {tuple(column.shape[1:])}: {remedy}"
            )
    check_whole(state, columns)
    # Older checkpoints do not store the search state. It only affects how ties are broken.
    saved_names, own_names = (
        {name for name in names if "search." not in name}
        for names in (part(state, "eviction"), policy.state())
    )
    if saved_names != own_names and not is_resharded(state):
        raise ValueError(
            f"the state was saved by another version of the eviction policy {policy.name}: offer "
            "its samples to a new memory, as `stream-ssl run CONFIG --run FOLDER --from OLD_RUN` "
            "does"
        )


def check_whole(state: State, columns: Columns) -> None:
    """Raise ValueError unless the columns, the counters and the generator are consistent."""
    rows = {name: len(value) for name, value in part(state, "columns").items()}
    held = rows["ids"]
    wrong = ""
    if len(set(rows.values())) > 1 or held > columns.capacity:
        wrong = f"its columns have {rows} rows, of {columns.capacity} slots"
    elif state["counters"].shape != (2 + len(astuple(Totals())),) or bool(
        (state["counters"] < 0).any()
    ):
        wrong = f"its counters are {state['counters'].tolist()}"
    elif columns.group.share(totals_of(state).inserted - totals_of(state).evicted) != held:
        wrong = f"its counters do not give the {held} samples that it holds"
    elif "drift" not in state or state["drift"].shape != (2,):
        wrong = "its drift at re-encoding is not two numbers"
    else:
        try:
            check_embeddings(state["columns.embeddings"], columns.dim, columns.device)
            torch.Generator().set_state(state["generator"].cpu())
            check_seed(state["seed"].item() if "seed" in state else 0)
        except (ValueError, RuntimeError, TypeError) as error:
            wrong = str(error)
    if wrong:
        raise _damaged(wrong)


def _damaged(wrong: str) -> ValueError:
    return ValueError(f"the state is damaged: {wrong}; load an earlier one")


class Stateful(Slots):
    """The part of a memory that `torch.nn.Module` saves, loads and moves.

    The state is one flat dict of tensors.
    """

    _strata: Strata
    _generator: torch.Generator
    _drift: Tensor
    _holdings: Holdings | None
    _near_duplicates: NearDuplicates | None
    _fixed_dtype: bool
    _seed: int
    _description: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that may change, also under torch.inference_mode()."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with torch.inference_mode(False):
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what pickle read. Tensors that it made in inference mode cannot be changed."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                state = copy.deepcopy(state, {id(self): self})
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    @on_host
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Add the memory's state to `destination`, from which a memory continues bit-equal.

        The tensors are copies, which safetensors accepts. With `keep_vars`, rows and images are the
        memory's own tensors, which later calls change.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)  # those of a subclass
        state = named("columns", self._columns.state(live=keep_vars))
        state |= named("eviction", self.eviction.state()) | named("strata", self._strata.state())
        state["counters"] = counters(self.capacity_of_all, self._totals)
        if self.group.size > 1:
            state["shard"] = torch.tensor([self.group.rank, self.group.size])
        state["description"] = encode(self._description)
        state |= named("descriptor", self.descriptor.state())
        if self._near_duplicates is not None:
            state |= named("near_duplicates", self._near_duplicates.state())
        state["drift"] = self._drift.clone()
        state["generator"] = self._generator.get_state()
        state["seed"] = torch.tensor(self._seed)
        keys = torch.unique(self._columns.producers[: len(self)])
        state["producer_names"] = encode_names(self._names.held(to_host(keys).tolist()))
        for name, value in state.items():
            destination[prefix + name] = value if value.numel() or keep_vars else _apart(value)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the memory's part of the state of the module that contains it."""
        del local_metadata, unexpected_keys
        state = {
            name[len(prefix) :]: v for name, v in state_dict.items() if name.startswith(prefix)
        }
        if not state:
            if strict:
                missing_keys.append(f"{prefix}counters")
            return
        try:
            self.load_state_dict(state)
        except ValueError as error:
            error_msgs.append(f"{prefix.rstrip('.') or 'memory'}: {error}")

    @on_host
    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` accepts this state. The memory is unchanged."""
        check_fits(upgraded(state_dict), self._columns, self.eviction, self._description)

    @changes_memory
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of a memory that was built with the same arguments.

        Args:
            state_dict: a result of `state_dict`.
            strict: ignored. It exists for compatibility with `torch.nn.Module`: a state is always
                loaded as a whole and copied.
            assign: ignored, as `strict` is.

        Returns:
            No missing and no unexpected keys, in the form of `torch.nn.Module`.

        Raises:
            ValueError: the state comes from a later version or from a memory with another capacity,
                dimension, image shape, descriptor, eviction policy, score or option of these, or it
                is damaged. The memory is then unchanged. Another setting of `duplicates` is
                allowed. On several ranks, a damaged entry of the policy, the descriptor or the
                cells may raise another error, and the memory cannot be used afterwards.
            RuntimeError: the device lacks memory, or a parameter of a subclass has another shape.
        """
        del strict, assign
        state = upgraded(state_dict)
        check_fits(state, self._columns, self.eviction, self._description)
        if self.group.size > 1:  # one rank alone cannot go back
            self._load(state)
        else:
            live = self.state_dict(keep_vars=True)
            before = {
                name: v.clone() if isinstance(v, Tensor) and name != IMAGES else v
                for name, v in live.items()
            }
            try:
                self._load(state)
            except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
                self._load(before)
                if NO_MEMORY.search(str(error)):
                    raise
                raise _damaged(str(error)) from error
        if self._columns.images is not None:  # last, so that going back needs no copy of them
            self._columns.images.load({"images": state[IMAGES]})
        self._load_subclass(state)
        return _IncompatibleKeys([], [])  # torch's result for a complete load

    def _load_subclass(self, state: State) -> None:
        """Load the parameters, buffers and modules that a subclass has registered."""
        for name, value in (*self._parameters.items(), *self._buffers.items()):
            if value is not None and name in state:
                value.copy_(state[name])
        for name, module in self._modules.items():
            if module is not None:
                module.load_state_dict(part(state, name), strict=False)

    def _load(self, state: State) -> None:
        """Load everything except the images."""
        columns = part({name: v for name, v in state.items() if name != IMAGES}, "columns")
        self._totals = totals_of(state)
        self._seed = int(state.get("seed", self._seed))  # older states have none
        self._generator.set_state(state["generator"].cpu())
        self._drift = state["drift"].clone().to(self.device)
        self._strata.load(part(state, "strata"), self.device)
        self.descriptor.load(part(state, "descriptor"))
        self.descriptor.to(self.device)
        if columns["embeddings"].dtype != self.dtype and not self._fixed_dtype:
            self._columns.promote(columns["embeddings"].dtype)
        self._columns.occupied = 0
        self.eviction.bind(self._columns, self._seed + 1)
        self._columns.load(columns)
        self._holdings, self._names = None, ProducerNames(producer_names(state))
        self._columns.occupied_of_all = self._totals.inserted - self._totals.evicted
        if is_resharded(state):
            self.eviction.bind(self._columns, self._seed + 1)
        if not is_resharded(state) or part(state, "eviction"):
            self.eviction.load(part(state, "eviction"))
        if columns["embeddings"].dtype != self.dtype:
            self._count_again(columns.get("descriptors", columns["embeddings"]).to(self.device))
        if self._near_duplicates is not None:
            self._near_duplicates.load(part(state, "near_duplicates"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device together with the containing module. Rows keep their dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, device=self.device)).device
        if device != self.device:
            self._move(device)
        return self

    @in_full_precision
    def _move(self, device: torch.device) -> None:
        policy: State = self.eviction.state()
        strata, self._drift = self._strata.state(), self._drift.to(device)
        self._columns.to(device)
        self.descriptor.to(device)
        self.eviction.bind(self._columns, self._seed + 1)
        if set(policy) == set(self.eviction.state()):  # index="auto" depends on the device
            self.eviction.load(policy)
        self._strata.load(strata, device)

    def _count_again(self, before_kA: Tensor) -> None:
        """Make the policy recompute what it counted of these rows, which had another dtype."""
        every = torch.arange(len(self), device=self.device)
        self.eviction.on_update(every, before_kA)


def _apart(empty: Tensor) -> Tensor:
    """Return the tensor, which has no elements, at an address of its own on the CPU.

    Torch gives all such tensors the address 0. Accelerate takes them for one tensor, and saves only
    one of them.
    """
    storage = torch.from_numpy(np.empty(0, np.uint8)).untyped_storage()
    return torch.empty(0, dtype=empty.dtype).set_(storage, 0, empty.shape, empty.stride())


def save(memory: WorkingMemory, path: Path | str) -> None:
    """Write the state of a memory to a file that survives a power cut.

    The state is written beside `path` and then renamed, so the file is always complete. A symbolic
    link stays, and the file to which it points is replaced.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the folder does not exist, or the disk rejects the write.
        ValueError: the path is a folder or a device, or safetensors lacks the dtype of a column.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():  # a rename would replace a device such as /dev/null
        raise ValueError(f"a memory cannot be saved to {path}: it is no file; give another path")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"a memory cannot be saved to {path}: there is no folder {path.parent}; make it first "
            f"(mkdir -p {path.parent})"
        )
    flat = {name: value.contiguous() for name, value in memory.state_dict().items()}
    # Processes of two containers may have one id, and threads of a process do.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.incomplete")
    try:
        try:
            _safetensors().save_file(flat, _in_utf8(scratch))
        except KeyError as error:
            raise ValueError(
                f"a file of safetensors holds no {error.args[0]}: give the payload another dtype"
            ) from error
        _sync(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    _sync(path.parent)


@on_host
def load(path: Path | str, eviction: Policy | None = None, **options: Any) -> WorkingMemory:
    """Return the memory that `save` wrote, which continues bit-equal.

    Args:
        path: the file.
        eviction: a policy with the same settings as the saved memory's.
        options: other arguments of WorkingMemory. The file determines capacity, dim, image_shape
            and payload.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file does not exist.
        ValueError: the file is not a memory, or it has another eviction policy, score, descriptor
            or version, or other options of these.
    """
    from stream_ssl.memory.memory import WorkingMemory

    library, path = _safetensors(), Path(path)
    if path.exists() and not path.is_file():  # safetensors would block on a pipe
        raise ValueError(f"{path} holds no memory: it is no regular file; give one of save()")
    try:
        state = library.load_file(_in_utf8(path))
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} holds no memory: it is no file of safetensors ({error}); give one of save()"
        ) from error
    try:
        capacity, dim = int(state["counters"][1]), state["columns.embeddings"].shape[1]
        shape = decode(state)["image_shape"]
        image_shape = None if shape is None else (shape[0], shape[1], shape[2])
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        found = ", ".join(sorted(state)[:5])
        raise ValueError(
            f"{path} holds no memory, but tensors such as {found or 'none'}: give a file of save()"
        ) from error
    further = "columns.payload."
    payload = {
        name.removeprefix(further): column.new_zeros(column.shape[1:])
        for name, column in state.items()
        if name.startswith(further)
    }
    options = {"payload": payload, **options}
    memory = WorkingMemory(capacity, dim, eviction, image_shape, **options)
    memory.load_state_dict(state)
    return memory


def _in_utf8(path: Path) -> Path:
    """Return a path that safetensors takes: a relative path if the whole path is not UTF-8."""
    text = str(path)
    return path if text == text.encode(errors="ignore").decode() else Path(os.path.relpath(path))


def _sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "a memory is saved with safetensors, which is not installed: pip install safetensors"
        ) from error
    return safetensors.torch

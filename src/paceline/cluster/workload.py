"""Describes the compute cost of one training step of a model, tensor by tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.errors import UsageError, unknown

if TYPE_CHECKING:
    import torch

FORMAT = "paceline workload 1"

_LEFT_OUT = (
    "shapes",
    "coding",
    "passes",
    "uses_gradients",
    "input",
    "overhead",
    "cores",
)
"""Keys that a file has only if they have a value."""

ELEMENT_BYTES = (1, 2, 4, 8, 16)
"""The possible bytes of a tensor's element."""


@dataclass(frozen=True, kw_only=True)
class CompressorTimes:
    """Seconds that a compressor takes for one gradient of all tensors, on one worker of speed 1.

    Attributes:
        encode: Seconds until the first compressed tensors are ready.
        decode: Seconds of all later work that does not depend on the number of workers.
        decode_per_worker: Seconds of all later work, for each worker.
    """

    encode: float
    decode: float
    decode_per_worker: float

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: One is negative or not finite.
        """
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(
                    f"coding: {entry.name}: expected zero or more seconds, got {value}"
                )

    def after(self, workers: int) -> float:
        """Return the seconds after the first compressed tensors, among *workers* workers."""
        return self.decode + workers * self.decode_per_worker


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Compute time of one training step, on one worker of speed 1.

    ``paceline profile SCRIPT`` measures one.

    Attributes:
        names: Trainable parameter tensors, in registration order.
        sizes: Bytes of their gradients.
        forward: Seconds that each tensor adds to the forward pass.
        backward: Seconds that each tensor adds to the backward pass.
        order: Positions in *names* in the order in which gradients become ready. By default the
            last registered one is first.
        update: Seconds of the optimizer's step.
        batch: Samples of a pass; None: not known.
        source: Origin of the figures, for the user.
        shapes: Shapes of the tensors; empty: not known.
        coding: By full spec, the times of compressors for one gradient. If a compressor is missing,
            the runtime charges an estimate from bytes.
        passes: Passes that accumulate into one update; None: not known.
        uses_gradients: Whether the script reads or changes gradients between backward and the
            update, for example to clip them; None: not known.
        input: Seconds of a thread's computing between a step's end and the next pass. This includes
            loading batches, zeroing gradients and logging losses, and excludes waits for other
            processes.
        overhead: Seconds of a thread's computing in a step, beside its passes and its update. This
            includes paceline's hooks, and the script's work between backward and the update.
        cores: Cores of the host that computing keeps busy. 0: another device computes, or the
            script sleeps instead. They matter if hosts share cores.

    Example:
        ::

            workload = paceline.Workload.load("resnet50")
            print(workload.compute_seconds, sum(workload.sizes))
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    order: tuple[int, ...] = ()
    update: float = 0.0
    batch: float | None = None
    source: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    coding: Mapping[str, CompressorTimes] = field(default_factory=dict, hash=False)
    passes: int | None = None
    uses_gradients: bool | None = None
    input: float = 0.0
    overhead: float = 0.0
    cores: int = 0

    def __post_init__(self) -> None:
        """Check the values, and fill in *order*.

        Raises:
            UsageError: Lengths differ, or a value is impossible.
        """
        if not self.names:
            raise UsageError("a workload without tensors: expected at least one")
        if len(set(self.names)) < len(self.names):
            twice = next(n for n in self.names if self.names.count(n) > 1)
            raise UsageError(f"names: tensor {twice!r} is listed twice")
        for key in ("sizes", "forward", "backward"):
            values = getattr(self, key)
            if len(values) != len(self.names):
                raise UsageError(
                    f"{key}: expected {len(self.names)} values, one per tensor, "
                    f"got {len(values)}"
                )
            for name, value in zip(self.names, values, strict=True):
                if not (value >= 0 and math.isfinite(value)):
                    raise UsageError(
                        f"{key} of tensor {name!r}: expected zero or more, got {value}"
                    )
        if not self.order:
            object.__setattr__(self, "order", tuple(range(len(self.names)))[::-1])
        if sorted(self.order) != list(range(len(self.names))):
            raise UsageError(
                f"order: expected each of 0 to {len(self.names) - 1} once, one per tensor"
            )
        for key in ("update", "input", "overhead"):
            value = getattr(self, key)
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{key}: expected zero or more seconds, got {value}")
        if self.batch is not None and not (
            self.batch > 0 and math.isfinite(self.batch)
        ):
            raise UsageError(
                f"batch: expected more than zero samples, got {self.batch}"
            )
        if self.cores < 0:
            raise UsageError(f"cores: expected 0 or more, got {self.cores}")
        if self.passes is not None and self.passes < 1:
            raise UsageError(
                f"passes: expected one or more an update, got {self.passes}"
            )
        self._check_shapes()

    def _check_shapes(self) -> None:
        if self.shapes and len(self.shapes) != len(self.names):
            raise UsageError(
                f"shapes: expected {len(self.names)}, one per tensor, or none at all, got "
                f"{len(self.shapes)}"
            )
        for name, size, shape in zip(self.names, self.sizes, self.shapes, strict=False):
            elements = math.prod(shape)
            bytes_an_element = [elements * n == size for n in ELEMENT_BYTES]
            if min(shape, default=0) < 0 or not any(bytes_an_element):
                raise UsageError(
                    f"shapes: tensor {name!r} of {size} bytes cannot have shape "
                    f"{tuple(shape)}, of {elements} elements: expected one with 1, 2, 4, 8 "
                    "or 16 bytes an element"
                )

    @property
    def forward_seconds(self) -> float:
        """Seconds of the whole forward pass."""
        return math.fsum(self.forward)

    @property
    def backward_seconds(self) -> float:
        """Seconds of the whole backward pass."""
        return math.fsum(self.backward)

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step: its passes, its update, its overhead, and the input before it."""
        passes = self.forward_seconds + self.backward_seconds
        beside = self.input + self.overhead
        return beside + (self.passes or 1) * passes + self.update

    @property
    def gradient_bytes(self) -> list[int]:
        """Each gradient's bytes, in the order in which gradients become ready."""
        return [self.sizes[i] for i in self.order]

    @property
    def ready_seconds(self) -> list[float]:
        """Seconds from the step's start until each gradient is ready, in ready order."""
        steps = [self.forward_seconds, *(self.backward[i] for i in self.order)]
        return list(itertools.accumulate(steps))[1:]

    def check_matches(
        self, names: Sequence[str], sizes: Sequence[int], what: str
    ) -> None:
        """Check that a model has the tensors of this workload.

        Args:
            names: The model's trainable parameters, in registration order.
            sizes: Bytes of their gradients.
            what: The workload's name in the error message.

        Raises:
            UsageError: They differ; the message names the first tensor that differs.
        """
        theirs = list(zip(names, sizes, strict=True))
        mine = list(zip(self.names, self.sizes, strict=True))
        for number, (model, profiled) in enumerate(itertools.zip_longest(theirs, mine)):
            if model != profiled:
                raise UsageError(
                    f"{what} is the profile of another model: tensor {number} of this "
                    f"model is {_tensor(model)}, in the profile {_tensor(profiled)}; "
                    "profile this one (paceline profile SCRIPT)"
                )

    @classmethod
    def spread(
        cls,
        names: Sequence[str],
        sizes: Sequence[int],
        forward_seconds: float,
        backward_seconds: float,
    ) -> Workload:
        """Make a workload from two totals, spread over the tensors in proportion to their bytes.

        Use it where nothing was measured: real layers cost by operations, not bytes.

        Args:
            names: Trainable parameter tensors, in registration order.
            sizes: Bytes of their gradients.
            forward_seconds: Seconds of the whole forward pass.
            backward_seconds: Seconds of the whole backward pass.
        """
        total = sum(sizes) or 1
        return cls(
            names=tuple(names),
            sizes=tuple(sizes),
            forward=tuple(forward_seconds * s / total for s in sizes),
            backward=tuple(backward_seconds * s / total for s in sizes),
        )

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        example: Any,
        flops_per_second: float,
        *,
        batch: float | None = None,
        update: float = 0.0,
        source: str = "",
    ) -> Workload:
        """Count a model's FLOPs, on the meta device, for a device of a given speed.

        See `paceline.cluster.flop_counter.count_step`.

        Args:
            module: The model.
            example: The argument of ``forward``: a tensor, a tuple of positional or a dict of
                keyword arguments. Only shapes and dtypes count.
            flops_per_second: Sustained speed of the device.
            batch: Samples in *example*; None: the first dimension of its first tensor.
            update: Seconds of the optimizer's step.
            source: Origin of the figures, for the user.
        """
        # This module needs torch.
        from paceline.cluster.flop_counter import count_step

        counted = count_step(
            module, example, flops_per_second, batch=batch, source=source
        )
        return cls(**vars(counted), update=update)

    def save(self, path: str | Path, made: dict[str, Any] | None = None) -> None:
        """Write this workload as JSON.

        Args:
            path: A file; an existing one is replaced.
            made: A record of how it was made, for `made_with`.

        Raises:
            UsageError: The file cannot be written.
        """
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        # Unknown values are left out, so that files of older versions stay the same.
        known = {
            key: value for key, value in known.items() if value or key not in _LEFT_OUT
        }
        if self.uses_gradients is not None:
            known["uses_gradients"] = self.uses_gradients
        content: dict[str, Any] = {"format": FORMAT, "workload": known}
        if made is not None:
            content["made"] = made
        text = msgspec.json.format(msgspec.json.encode(content), indent=1)
        try:
            Path(path).write_bytes(text + b"\n")
        except OSError as error:
            raise UsageError(f"cannot write the workload {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read a file that `save` wrote, or a built-in workload.

        Args:
            path: A file, or a name of `builtin_names`. For a file of such a name pass ``./NAME``.

        Raises:
            UsageError: There is no such file, or it is no workload; the message says what is wrong
                with it.
        """
        if str(path) in builtin_names():
            folder = resources.files("paceline.cluster") / "workloads"
            return cls._read((folder / f"{path}.json").read_bytes(), str(path))
        try:
            content = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            hint = unknown("built-in workload", str(path), builtin_names())
            raise UsageError(
                f"cannot read the workload {path}: {error}; {hint}"
            ) from error
        return cls._read(content, str(path))

    @classmethod
    def _read(cls, content: bytes, name: str) -> Workload:
        try:
            file = msgspec.json.decode(content, type=_File)
            if file.format != FORMAT:
                raise msgspec.ValidationError(
                    f"its format is {file.format!r}, not {FORMAT!r}"
                )
            known = [f.name for f in fields(cls)]
            for key in file.workload:
                if key not in known:
                    raise msgspec.ValidationError(unknown("key", key, known))
            return msgspec.convert(file.workload, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{name} is not a workload: {error}; make one with paceline profile SCRIPT"
            ) from error


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    workload: dict[str, Any]
    made: dict[str, Any] | None = None


def made_with(path: str | Path) -> dict[str, Any] | None:
    """Return the record of how a workload file was made, or None.

    `Workload.load` must have read the file before.
    """
    return msgspec.json.decode(Path(path).read_bytes(), type=_File).made


def builtin_names() -> list[str]:
    """Return the workloads that come with paceline; a script in ``benchmarks/`` makes each."""
    folder = resources.files("paceline.cluster") / "workloads"
    names = (entry.name for entry in folder.iterdir())
    return sorted(n.removesuffix(".json") for n in names if n.endswith(".json"))


def _tensor(pair: tuple[str, int] | None) -> str:
    return "missing" if pair is None else f"{pair[0]!r} of {pair[1]} bytes"

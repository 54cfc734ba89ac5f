"""The few calls of libbpf that are needed, by ctypes: an object file, its maps, programs, links.

A link holds a program at an interface as long as its descriptor is open: so when this process
ends, however it ends, nothing stays in the kernel.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from paceline.aggregator.packets import Array

NAME = "libbpf.so.1"
XDP, TCX_INGRESS = 37, 46
"""Where a program can be attached."""
NATIVE, GENERIC = 1 << 2, 1 << 1
"""Of XDP: in the device's driver, or after it."""
_LOG_BYTES = 1 << 24


class _OpenOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("object_name", ctypes.c_char_p),
        ("relaxed_maps", ctypes.c_bool),
        ("pin_root_path", ctypes.c_char_p),
        ("unused", ctypes.c_uint32),
        ("kconfig", ctypes.c_char_p),
        ("btf_custom_path", ctypes.c_char_p),
        ("kernel_log", ctypes.c_void_p),
        ("kernel_log_bytes", ctypes.c_size_t),
        ("kernel_log_level", ctypes.c_uint32),
    )


class _LinkOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("more", ctypes.c_uint64 * 6),
    )


class _RunOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("data_in", ctypes.c_void_p),
        ("data_out", ctypes.c_void_p),
        ("bytes_in", ctypes.c_uint32),
        ("bytes_out", ctypes.c_uint32),
        ("context_in", ctypes.c_void_p),
        ("context_out", ctypes.c_void_p),
        ("context_bytes_in", ctypes.c_uint32),
        ("context_bytes_out", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
        ("repeat", ctypes.c_int),
        ("nanoseconds", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("processor", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
    )


class BpfError(OSError):
    """A call failed. *log*: what the kernel's verifier said, if it did."""

    def __init__(self, error: int, what: str, log: str = "") -> None:
        super().__init__(error, f"{what}: {os.strerror(error)}")
        self.log = log


def library() -> ctypes.CDLL:
    """Raises `OSError` where there is none."""
    found = ctypes.CDLL(NAME, use_errno=True)
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    for call, result, arguments in (
        ("bpf_object__open_file", pointer, (text, pointer)),
        ("bpf_object__load", number, (pointer,)),
        ("bpf_object__close", None, (pointer,)),
        ("bpf_object__find_map_by_name", pointer, (pointer, text)),
        ("bpf_object__find_program_by_name", pointer, (pointer, text)),
        ("bpf_map__set_max_entries", number, (pointer, ctypes.c_uint32)),
        ("bpf_map__fd", number, (pointer,)),
        ("bpf_map__value_size", ctypes.c_uint32, (pointer,)),
        ("bpf_program__fd", number, (pointer,)),
        ("bpf_map_update_elem", number, (number, pointer, pointer, ctypes.c_uint64)),
        ("bpf_map_lookup_elem", number, (number, pointer, pointer)),
        ("bpf_map_delete_elem", number, (number, pointer)),
        ("bpf_link_create", number, (number, number, number, pointer)),
        ("bpf_prog_test_run_opts", number, (number, pointer)),
        ("libbpf_num_possible_cpus", number, ()),
        ("libbpf_set_print", pointer, (pointer,)),
    ):
        function = getattr(found, call)
        function.restype, function.argtypes = result, arguments
    found.libbpf_set_print(None)
    return found


class Map:
    """A map of the kernel: keys are uint32, values arrays of *dtype*."""

    def __init__(self, lib: ctypes.CDLL, handle: int, dtype: np.dtype[Any]) -> None:
        self._lib, self._dtype = lib, dtype
        size = lib.bpf_map__value_size(handle)
        if size != dtype.itemsize:
            raise AssertionError(f"a value has {size} bytes, not {dtype.itemsize}")
        self._descriptor = lib.bpf_map__fd(handle)

    def __setitem__(self, key: int, value: Array) -> None:
        assert value.dtype == self._dtype, value.dtype
        self._call("bpf_map_update_elem", key, np.ascontiguousarray(value), 0)

    def __delitem__(self, key: int) -> None:
        self._call("bpf_map_delete_elem", key)

    def read(self, key: int, processors: int = 1) -> Array:
        """What is there; of a map with a value for each processor, all of them."""
        value = np.zeros(processors, self._dtype)
        self._call("bpf_map_lookup_elem", key, value)
        return value

    def _call(
        self, name: str, key: int, value: Array | None = None, *more: int
    ) -> None:
        place = ctypes.byref(ctypes.c_uint32(key))
        words = (place,) if value is None else (place, value.ctypes.data)
        if getattr(self._lib, name)(self._descriptor, *words, *more) < 0:
            raise BpfError(ctypes.get_errno(), f"{name} of {key}")


class Objects:
    """What an object file defines, in the kernel. Raises `BpfError`."""

    def __init__(self, lib: ctypes.CDLL, path: str, entries: dict[str, int]) -> None:
        """*entries*: how many values maps have, by name, where it is not in the file."""
        self._lib = lib
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = _OpenOptions(
            size=ctypes.sizeof(_OpenOptions),
            kernel_log=ctypes.addressof(log),
            kernel_log_bytes=_LOG_BYTES,
        )
        self._handle = lib.bpf_object__open_file(path.encode(), ctypes.byref(options))
        if not self._handle:
            raise BpfError(ctypes.get_errno(), f"opening {path}")
        for name, count in entries.items():
            lib.bpf_map__set_max_entries(self._map(name), count)
        error = lib.bpf_object__load(self._handle)
        if error:
            self.close()
            raise BpfError(
                -error, f"loading {path}", log.value.decode(errors="replace")
            )

    def close(self) -> None:
        """Let go of it all, but for what links hold."""
        self._lib.bpf_object__close(self._handle)

    def _map(self, name: str) -> int:
        return int(self._lib.bpf_object__find_map_by_name(self._handle, name.encode()))

    def map(self, name: str, dtype: np.dtype[Any]) -> Map:
        """The map of that name."""
        return Map(self._lib, self._map(name), dtype)

    def program(self, name: str) -> int:
        """The descriptor of the program of that name."""
        find = self._lib.bpf_object__find_program_by_name
        return int(self._lib.bpf_program__fd(find(self._handle, name.encode())))

    def attach(self, program: str, interface: int, where: int, flags: int = 0) -> int:
        """A descriptor that holds the program at an interface until it is closed."""
        options = _LinkOptions(size=ctypes.sizeof(_LinkOptions), flags=flags)
        link = self._lib.bpf_link_create(
            self.program(program), interface, where, ctypes.byref(options)
        )
        if link < 0:
            raise BpfError(ctypes.get_errno(), f"attaching {program}")
        return int(link)

    def run(self, program: str, data: bytes, repeat: int = 1) -> tuple[int, bytes, int]:
        """Let a program deal with a packet: its result, what has become of the packet, and
        the nanoseconds that it took on average."""
        given = ctypes.create_string_buffer(data, len(data))
        room = ctypes.create_string_buffer(1 << 16)
        options = _RunOptions(
            size=ctypes.sizeof(_RunOptions),
            data_in=ctypes.addressof(given),
            bytes_in=len(data),
            data_out=ctypes.addressof(room),
            bytes_out=len(room),
            repeat=repeat,
        )
        call = self._lib.bpf_prog_test_run_opts
        if call(self.program(program), ctypes.byref(options)) < 0:
            raise BpfError(ctypes.get_errno(), f"trying {program}")
        result = ctypes.c_int32(options.result).value
        return result, room.raw[: options.bytes_out], options.nanoseconds

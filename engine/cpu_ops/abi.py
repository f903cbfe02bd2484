"""The structs of src/jobs.h as ctypes sees them. Fields are 8 bytes each, so that no compiler pads them its own way."""

from __future__ import annotations

import ctypes
from enum import IntEnum

MAX_BUFFERS = 8


class JobKind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTATE_WRITE = 3
    ATTEND = 4
    QUANTIZE = 5


class ElementType(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class LinearMode(IntEnum):
    STORE = 0
    ADD = 1
    SILU_MUL = 2


class Job(ctypes.Structure):
    """One operator over all tokens of a step. What the fields mean stands in src/jobs.h."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("source", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("mode", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


class Group(ctypes.Structure):
    _fields_ = (
        ("write_index", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p * MAX_BUFFERS),
        ("strides", ctypes.c_int64 * MAX_BUFFERS),
        ("queries", ctypes.c_void_p),
        ("query_count", ctypes.c_int64),
    )

"""The kinds of arrays that records hold. Spelled out, because msgspec asks their annotations for the numbers' type (`rlx.codec`)."""

from __future__ import annotations

from typing import Any

import numpy as np

Int = np.ndarray[Any, np.dtype[np.int32]]
Long = np.ndarray[Any, np.dtype[np.int64]]
Float = np.ndarray[Any, np.dtype[np.float32]]
Half = np.ndarray[Any, np.dtype[np.float16]]
Bool = np.ndarray[Any, np.dtype[np.bool_]]
Unsigned = np.ndarray[Any, np.dtype[np.uint32]]
Byte = np.ndarray[Any, np.dtype[np.uint8]]

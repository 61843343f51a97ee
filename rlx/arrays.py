"""The three kinds of arrays that records hold. A module of its own, so that the records can be imported without numpy.

Planning a run needs records without arrays only, and numpy was a tenth of a dry run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int32]
Float = NDArray[np.float32]
Bool = NDArray[np.bool_]

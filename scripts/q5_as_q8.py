"""Write a GGUF file again with its Q5_0 tensors as Q8_0: every weight stays the same number.

A Q5_0 weight is d * q with q from -16 to 15, which Q8_0 holds as it is. The file is larger; ggml multiplies Q8_0 faster
where the CPU has int8 matrix units, and long sweeps gain from it.

    python scripts/q5_as_q8.py model.gguf model-q8.gguf     # needs gguf: pip install gguf
"""

from __future__ import annotations

import sys

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

U8 = npt.NDArray[np.uint8]
Q5_BYTES = 22  # a block of 32 weights: d as F16, the fifth bits, and 16 bytes of two weights' other four


def widen(data: U8) -> U8:
    """Rows of Q5_0 blocks as rows of Q8_0 blocks."""
    block = np.ascontiguousarray(data).reshape(-1, Q5_BYTES)
    d, fifth, nibbles = block[:, :2], block[:, 2:6].copy().view(np.uint32), block[:, 6:]
    low = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.int8)
    high = ((fifth >> np.arange(32, dtype=np.uint32)) & 1).astype(np.int8)
    out: U8 = np.concatenate([d, (low + 16 * high - 16).view(np.uint8)], axis=1).reshape(*data.shape[:-1], -1)
    return out


def main(source: str, target: str) -> None:
    """Copy `source` to `target`, and check each tensor that changed its type."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(
                name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        data, kind = np.asarray(tensor.data), tensor.tensor_type
        if kind == Type.Q5_0:
            wide = widen(data)
            if not np.array_equal(gguf.dequantize(data, kind), gguf.dequantize(wide, Type.Q8_0)):
                sys.exit(f"{tensor.name} changed, expected the same weights")
            data, kind = wide, Type.Q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=None if data.dtype == np.float32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("two arguments expected: the GGUF file to read, and the one to write")
    main(*sys.argv[1:])

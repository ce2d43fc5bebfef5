"""The programs that run on the device. Only this file imports Triton; import it where `runs_on` says yes."""

import triton
import triton.language as tl


@triton.jit
def combine_lists(
    addresses, blocks, count, a, b,
    out_type: tl.constexpr, x_type: tl.constexpr, y_type: tl.constexpr,
    aligned: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One block of one tensor, a piece at a time."""
    entry = blocks + 3 * tl.program_id(0)
    tensor, number, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    out = tl.load(addresses + tensor).to(tl.pointer_type(out_type))
    x = tl.load(addresses + count + tensor).to(tl.pointer_type(x_type))
    y = tl.load(addresses + 2 * count + tensor).to(tl.pointer_type(y_type))
    if aligned:
        out, x, y = tl.multiple_of(out, 16), tl.multiple_of(x, 16), tl.multiple_of(y, 16)
        size = tl.multiple_of(size, 16)
    for piece in tl.static_range(0, BLOCK, PIECE):
        here = number * BLOCK + piece + tl.arange(0, PIECE)
        inside = here < size
        result = a * tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        result += b * tl.load(y + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + here, result.to(out_type), mask=inside)


@triton.jit
def symmetric_tile(
    a_ptr, b_ptr, out_ptr, d_ptr, e_ptr, alpha, beta, gamma, m, k,
    a_batch, a_row, a_column, b_batch, b_row, b_column,
    terms: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile (row >= column) of one matrix. D, E and C are contiguous."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # The number of a tile below the diagonal, counted row by row: tile = row (row + 1) / 2 + column.
    row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    column = tile - row * (row + 1) // 2
    rows = row * TILE + tl.arange(0, TILE)
    columns = column * TILE + tl.arange(0, TILE)
    steps = tl.arange(0, STEP)
    # Rows beyond the matrix read from its start instead: their results are never written.
    a_at = a_ptr + batch * a_batch + ((rows % m)[:, None] * a_row + steps[None, :] * a_column)
    b_at = b_ptr + batch * b_batch + (steps[:, None] * b_row + (columns % m)[None, :] * b_column)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for done in range(0, k, STEP):
        left = k - done
        a = tl.load(a_at, mask=steps[None, :] < left, other=0.0)
        b = tl.load(b_at, mask=steps[:, None] < left, other=0.0)
        total = tl.dot(a, b, total)
        a_at += STEP * a_column
        b_at += STEP * b_row
    total *= alpha
    here = batch * m * m + rows[:, None] * m + columns[None, :]
    inside = (rows < m)[:, None] & (columns < m)[None, :]
    if terms > 0:
        total += beta * tl.load(d_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if terms > 1:
        total += gamma * tl.load(e_ptr + here, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + here, result, mask=inside)
    if row != column:
        mirror = batch * m * m + columns[:, None] * m + rows[None, :]
        inside_mirror = (columns < m)[:, None] & (rows < m)[None, :]
        tl.store(out_ptr + mirror, tl.trans(result), mask=inside_mirror)

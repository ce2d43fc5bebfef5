"""The programs that run on the device. Only this file imports Triton; import it where `runs_on` says yes."""

import triton
import triton.language as tl


@triton.jit
def combine_lists(
    addresses, blocks, count, a, b, c, d,
    out_type: tl.constexpr, x_type: tl.constexpr, y_type: tl.constexpr, also_type: tl.constexpr,
    aligned: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One block of one tensor, a piece at a time: out = a x + b y and, with `also_type`, also = c x + d y."""
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
        x_here = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        y_here = tl.load(y + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + here, (a * x_here + b * y_here).to(out_type), mask=inside)
        if also_type is not None:
            also = tl.load(addresses + 3 * count + tensor).to(tl.pointer_type(also_type))
            if aligned:
                also = tl.multiple_of(also, 16)
            tl.store(also + here, (c * x_here + d * y_here).to(also_type), mask=inside)


@triton.jit
def divide_rows(x, out, divisors, least, size, BLOCK: tl.constexpr):
    """out[n, :] = x[n, :] / max(divisors[n], least); one block of one row."""
    row = tl.program_id(1).to(tl.int64)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = here < size
    divisor = tl.maximum(tl.load(divisors + row), least)
    value = tl.load(x + row * size + here, mask=inside, other=0.0).to(tl.float32) / divisor
    tl.store(out + row * size + here, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def symmetric_tile(
    a_ptr, b_ptr, out_ptr, d_ptr, e_ptr, alpha, beta, gamma, diagonal, m, k,
    terms: tl.constexpr, tall: tl.constexpr, even: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile (row >= column) of one matrix; every matrix is contiguous. `even`: STEP divides k."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # The number of a tile below the diagonal, counted row by row: tile = row (row + 1) / 2 + column.
    row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    column = tile - row * (row + 1) // 2
    rows = row * TILE + tl.arange(0, TILE)
    columns = column * TILE + tl.arange(0, TILE)
    steps = tl.arange(0, STEP)
    along, across = (m, 1) if tall else (1, k)  # strides: of the sum's index, of a row
    # Rows beyond the matrix read from its start instead: what comes of them is never written.
    a_at = a_ptr + batch * m * k + ((rows % m)[:, None] * across + steps[None, :] * along)
    b_at = b_ptr + batch * m * k + (steps[:, None] * along + (columns % m)[None, :] * across)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for done in range(0, k, STEP):
        if even:
            total = tl.dot(tl.load(a_at), tl.load(b_at), total)
        else:
            a = tl.load(a_at, mask=steps[None, :] < k - done, other=0.0)
            b = tl.load(b_at, mask=steps[:, None] < k - done, other=0.0)
            total = tl.dot(a, b, total)
        a_at += STEP * along
        b_at += STEP * along
    total *= alpha
    here = batch * m * m + rows[:, None] * m + columns[None, :]
    inside = (rows < m)[:, None] & (columns < m)[None, :]
    if terms > 0:
        total += beta * tl.load(d_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if terms > 1:
        total += gamma * tl.load(e_ptr + here, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(rows[:, None] == columns[None, :], total + diagonal, total)
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + here, result, mask=inside)
    if row != column:
        mirror = batch * m * m + columns[:, None] * m + rows[None, :]
        tl.store(out_ptr + mirror, tl.trans(result), mask=tl.trans(inside))

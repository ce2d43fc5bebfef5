"""The programs that run on the device. Only this file imports Triton; import it where `runs_on` says yes."""

import triton
import triton.language as tl


@triton.jit
def combine_lists(
    addresses, blocks, count, a, b, c, d, numbers,
    out_type: tl.constexpr, x_type: tl.constexpr, y_type: tl.constexpr, also_type: tl.constexpr,
    aligned: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One block of one tensor, a piece at a time: out = a x + b y and, with `also_type`, also = c x + d y. a and b are
    in `numbers`, where there are any."""
    if numbers is not None:
        a, b = tl.load(numbers), tl.load(numbers + 1)
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
def split_lists(
    addresses, blocks, count,
    both: tl.constexpr, aligned: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One block of one float32 tensor into its upper half and, with `both`, its lower one (`halves.py`)."""
    entry = blocks + 3 * tl.program_id(0)
    tensor, number, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    whole = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    high = tl.load(addresses + count + tensor).to(tl.pointer_type(tl.int16))
    if aligned:
        whole, high, size = tl.multiple_of(whole, 16), tl.multiple_of(high, 16), tl.multiple_of(size, 16)
    for piece in tl.static_range(0, BLOCK, PIECE):
        here = number * BLOCK + piece + tl.arange(0, PIECE)
        inside = here < size
        bits = tl.load(whole + here, mask=inside, other=0)
        no_number = (bits & 0x7FFFFFFF) > 0x7F800000
        tl.store(high + here, tl.where(no_number, 0x7FC0, (bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        if both:
            low = tl.load(addresses + 2 * count + tensor).to(tl.pointer_type(tl.int16))
            if aligned:
                low = tl.multiple_of(low, 16)
            tl.store(low + here, bits.to(tl.int16), mask=inside)


@triton.jit
def join_lists(
    addresses, blocks, count, aligned: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """One block of one float32 tensor from its halves."""
    entry = blocks + 3 * tl.program_id(0)
    tensor, number, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    whole = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    high = tl.load(addresses + count + tensor).to(tl.pointer_type(tl.int16))
    low = tl.load(addresses + 2 * count + tensor).to(tl.pointer_type(tl.int16))
    if aligned:
        whole, high, low = tl.multiple_of(whole, 16), tl.multiple_of(high, 16), tl.multiple_of(low, 16)
        size = tl.multiple_of(size, 16)
    for piece in tl.static_range(0, BLOCK, PIECE):
        here = number * BLOCK + piece + tl.arange(0, PIECE)
        inside = here < size
        upper = tl.load(high + here, mask=inside, other=0).to(tl.int32)
        lower = tl.load(low + here, mask=inside, other=0).to(tl.int32)
        tl.store(whole + here, (upper << 16) + lower, mask=inside)


@triton.jit
def square_sums(x, sums, size, parts, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """sums[n, i] = the sum of squares of block i of x[n, :]."""
    row, number = tl.program_id(1).to(tl.int64), tl.program_id(0)
    total = tl.zeros((PIECE,), dtype=tl.float32)
    for piece in tl.static_range(0, BLOCK, PIECE):
        here = number * BLOCK + piece + tl.arange(0, PIECE)
        value = tl.load(x + row * size + here, mask=here < size, other=0.0).to(tl.float32)
        total += value * value
    tl.store(sums + row * parts + number, tl.sum(total))


@triton.jit
def divide_by_norm(x, out, sums, least, size, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """out[n, :] = x[n, :] / max(the root of all sums[n, :], least); one block of one row."""
    row = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PARTS)
    squares = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    divisor = tl.maximum(tl.sqrt(tl.sum(squares)), least)
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = here < size
    value = tl.load(x + row * size + here, mask=inside, other=0.0).to(tl.float32) / divisor
    tl.store(out + row * size + here, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def product_tile(
    a, b, out, m, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """One tile of one matrix. `out` is described as [N, m, c], the others as rows of all N matrices (so a tile that
    sticks out of its matrix reads rows of the next one, but writes nothing that comes of them)."""
    row, column, batch = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS, tl.program_id(2)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(0, k, STEP):
        total = tl.dot(a.load([batch * m + row, done]), b.load([batch * k + done, column]), total)
    out.store([batch, row, column], total.to(out.dtype).reshape(1, ROWS, COLUMNS))


@triton.jit
def add_dithered(total, term, seed, size, BLOCK: tl.constexpr):
    """total (bf16, as int16) ← total + term, rounded by a hash of the place (`dither.py`)."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < size
    before = tl.load(total + here, mask=inside, other=0).to(tl.bfloat16, bitcast=True).to(tl.float32)
    exact = before + tl.load(term + here, mask=inside, other=0.0).to(tl.float32)
    noise = here.to(tl.int32) * -1640531527 + seed
    noise = (noise ^ (noise >> 15)) * -2048144777
    noise = (noise ^ (noise >> 15)) * -1028477379
    noise = (noise ^ (noise >> 16)) & 0xFFFF
    rounded = (exact.to(tl.int32, bitcast=True) + noise) >> 16
    tl.store(total + here, rounded.to(tl.int16), mask=inside)


@triton.jit
def symmetric_tile(
    a, b, out, d, e, alpha, beta, gamma, diagonal, m, k,
    terms: tl.constexpr, tall: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile (row >= column) of one matrix. `out` is described as [N, m, m], the others as rows of all N matrices.

    So a tile that sticks out of its matrix reads rows of the next one, but writes nothing that comes of them.
    """
    tile, batch = tl.program_id(0), tl.program_id(1)
    # The number of a tile below the diagonal, counted row by row: tile = row (row + 1) / 2 + column.
    row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    column = (tile - row * (row + 1) // 2) * TILE
    row *= TILE
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for done in range(0, k, STEP):
        if tall:
            total = tl.dot(a.load([batch * k + done, row]).T, b.load([batch * k + done, column]), total)
        else:
            total = tl.dot(a.load([batch * m + row, done]), b.load([batch * m + column, done]).T, total)
    total *= alpha
    if terms > 0:
        total += beta * d.load([batch * m + row, column]).to(tl.float32)
    if terms > 1:
        total += gamma * e.load([batch * m + row, column]).to(tl.float32)
    if row == column:
        here = tl.arange(0, TILE)
        total = tl.where(here[:, None] == here[None, :], total + diagonal, total)
    result = total.to(out.dtype)
    # Not `result[None]`: only a reshape goes from the product's registers to the store without a detour.
    out.store([batch, row, column], result.reshape(1, TILE, TILE))
    if row != column:
        out.store([batch, column, row], result.T.reshape(1, TILE, TILE))

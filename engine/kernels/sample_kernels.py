"""The Triton programs of `sample.py`, which explains how they fit together."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _uniform(stream_key, candidate, step):
    """(x0 + 0.5) / 2**32 in float64, x0 the first word of Philox4x32-10 on uint64 words."""
    MASK: tl.constexpr = 0xFFFFFFFF
    k0 = tl.load(stream_key).to(tl.uint32, bitcast=True).to(tl.uint64)
    k1 = tl.load(stream_key + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    wide = candidate.to(tl.int64).to(tl.uint64, bitcast=True)
    c0 = wide & MASK
    c1 = step.to(tl.uint32, bitcast=True).to(tl.uint64)
    c2 = wide >> 32
    c3 = c0 & 0
    for _ in tl.static_range(10):
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0 = (product1 >> 32) ^ c1 ^ k0
        c1 = product1 & MASK
        c2 = (product0 >> 32) ^ c3 ^ k1
        c3 = product0 & MASK
        k0 = (k0 + 0x9E3779B9) & MASK
        k1 = (k1 + 0xBB67AE85) & MASK
    return (c0.to(tl.float64) + 0.5) * 2.3283064365386962890625e-10


@triton.jit
def _clean(x):
    """float32 without NaN (+inf instead, which marks the row as bad) and without -0.0."""
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _load(row_logits, ids, vocab):
    return _clean(tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf")))


@triton.jit
def _image(x):
    """uint32 that order like the float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _kth_largest(image, k, LOW_BITS: tl.constexpr):
    """The largest threshold that k of the images reach, bit by bit; 0 where there are fewer."""
    threshold = tl.full([], 0, tl.uint32)
    for step in tl.static_range(32 - LOW_BITS):
        candidate = threshold | tl.full([], 1 << (31 - step), tl.uint32)
        enough = tl.sum((image >= candidate).to(tl.int32), axis=0) >= k
        threshold = tl.where(enough, candidate, threshold)
    return threshold


@triton.jit
def _top_p_threshold(image, weight, needed, LOW_BITS: tl.constexpr):
    """The largest threshold at which the weights still reach `needed`."""
    threshold = tl.full([], 0, tl.uint32)
    for step in tl.static_range(32 - LOW_BITS):
        candidate = threshold | tl.full([], 1 << (31 - step), tl.uint32)
        enough = tl.sum(tl.where(image >= candidate, weight, 0.0), axis=0) >= needed
        threshold = tl.where(enough, candidate, threshold)
    return threshold


@triton.jit
def _weight(x, threshold, best, temperature):
    """float64 softmax weights of the values whose image reaches the threshold."""
    weight = tl.where(_image(x) >= threshold, tl.exp((x - best) / temperature), 0.0)
    return weight.to(tl.float64)


@triton.jit
def _first_past(weight, before, target, BLOCK: tl.constexpr):
    """First index whose running sum passes the target; the last with a weight where none does."""
    index = tl.arange(0, BLOCK)
    running = before + tl.cumsum(weight, axis=0)
    first = tl.min(tl.where((running > target) & (weight > 0), index, BLOCK), axis=0)
    last = tl.max(tl.where(weight > 0, index, 0), axis=0)
    return tl.where(first < BLOCK, first, last)


@triton.jit
def _write(
    row, token, is_bad, column, tokens, tokens_stride, last_token, done, bad, stop_ids, STOPS
):
    token = tl.where(is_bad, 0, token)
    stops = tl.load(stop_ids + tl.arange(0, STOPS))
    stopped = tl.max((stops == token).to(tl.int32), axis=0)
    was_done = tl.load(done + row)
    tl.store(tokens + row * tokens_stride + column, token.to(tokens.dtype.element_ty))
    tl.store(last_token + row, token.to(last_token.dtype.element_ty))
    end = tl.where(is_bad, -1, stopped) * (column + 1)
    tl.store(done + row, tl.where(was_done == 0, end, was_done))
    if is_bad:
        tl.store(bad + row, tl.full([], 1, tl.uint8))


@triton.jit
def group_maxima_kernel(
    logits,
    logits_stride,
    group_max,
    chunk_max,
    chunk_sum,
    vocab,
    num_groups,
    num_chunks,
    temperature,
    MASS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Maxima of a chunk's groups; with MASS also its maximum and its sum of weights."""
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load(logits + row * logits_stride, ids, vocab)
    largest = tl.max(x, axis=1)
    tl.store(group_max + row * num_groups + group, largest, mask=group < num_groups)
    if MASS:
        best = tl.max(largest, axis=0)
        weight = tl.exp((x - tl.where(best == float("-inf"), 0.0, best)) / temperature)
        tl.store(chunk_max + row * num_chunks + chunk, best)
        tl.store(chunk_sum + row * num_chunks + chunk, tl.sum(tl.sum(weight, axis=1), axis=0))


@triton.jit
def _chunk_masses(
    chunk_max, chunk_sum, row, num_chunks, best, temperature, CHUNKS_PAD: tl.constexpr
):
    """float64 weights of a row's chunks, relative to the row's maximum."""
    chunk = tl.arange(0, CHUNKS_PAD)
    there = chunk < num_chunks
    largest = tl.load(chunk_max + row * num_chunks + chunk, mask=there, other=float("-inf"))
    total = tl.load(chunk_sum + row * num_chunks + chunk, mask=there, other=0.0)
    return (total * tl.exp((largest - best) / temperature)).to(tl.float64)


@triton.jit
def pick_kernel(
    logits,
    logits_stride,
    group_max,
    chunk_max,
    chunk_sum,
    kept_groups,
    kept_values,
    kept_ids,
    whole_row,
    stream_key,
    candidates,
    step_at,
    column_at,
    tokens,
    tokens_stride,
    last_token,
    done,
    bad,
    stop_ids,
    vocab,
    num_groups,
    num_chunks,
    k,
    temperature,
    MODE: tl.constexpr,
    TOP_P: tl.constexpr,
    LOW_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    STOPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PAD)
    largest = tl.load(
        group_max + row * num_groups + group, mask=group < num_groups, other=float("-inf")
    )
    best = tl.max(largest, axis=0)
    is_bad = (best == float("inf")) | (best == float("-inf"))
    row_logits = logits + row * logits_stride
    in_group = tl.arange(0, GROUP)
    fits = True
    token = tl.full([], 0, tl.int32)
    if MODE == "greedy":
        first_group = tl.min(tl.where(largest == best, group, GROUPS_PAD), axis=0)
        ids = first_group * GROUP + in_group
        x = _load(row_logits, ids, vocab)
        token = tl.min(tl.where(x == best, ids, vocab), axis=0)
    elif MODE == "all":
        u = _uniform(stream_key, tl.load(candidates + row), tl.load(step_at))
        mass = _chunk_masses(chunk_max, chunk_sum, row, num_chunks, best, temperature, CHUNKS_PAD)
        target = u * tl.sum(mass, axis=0)
        chunk = _first_past(mass, 0.0, target, CHUNKS_PAD)
        before = tl.sum(tl.where(tl.arange(0, CHUNKS_PAD) < chunk, mass, 0.0), axis=0)
        x = _load(row_logits, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        weight = tl.exp((x - best) / temperature).to(tl.float64)
        token = chunk * CHUNK + _first_past(weight, before, target, CHUNK)
    else:
        image = _image(largest)
        bound = _kth_largest(image, k, LOW_BITS)
        keep = (image >= bound) & (largest > float("-inf"))
        kept = keep.to(tl.int32)
        place = tl.cumsum(kept, axis=0) - kept
        num_kept = tl.sum(kept, axis=0)
        tl.store(kept_groups + row * num_groups + place, group, mask=keep)
        tl.debug_barrier()  # the list is read by other threads than wrote it

        count = tl.full([], 0, tl.int32)
        for first in range(0, num_kept, TILE):
            slot = first + tl.arange(0, TILE)
            tile = tl.load(
                kept_groups + row * num_groups + slot, mask=slot < num_kept, other=num_groups
            )
            ids = tile[:, None] * GROUP + in_group[None, :]
            x = _load(row_logits, ids, vocab)
            keep_x = (_image(x) >= bound) & (x > float("-inf"))
            kept_x = keep_x.to(tl.int32)
            per_group = tl.sum(kept_x, axis=1)
            before = tl.cumsum(per_group, axis=0) - per_group
            place_x = count + before[:, None] + tl.cumsum(kept_x, axis=1) - kept_x
            room = keep_x & (place_x < CAPACITY)
            tl.store(kept_values + row * CAPACITY + place_x, x, mask=room)
            tl.store(kept_ids + row * CAPACITY + place_x, ids, mask=room)
            count += tl.sum(per_group, axis=0)
        tl.debug_barrier()

        fits = count <= CAPACITY
        place = tl.arange(0, CAPACITY)
        there = (place < count) & (is_bad == 0)
        value = tl.load(kept_values + row * CAPACITY + place, mask=there, other=float("-inf"))
        value_ids = tl.load(kept_ids + row * CAPACITY + place, mask=there, other=0)
        value_image = _image(value)
        if MODE == "top-k":
            there = there & (value_image >= _kth_largest(value_image, k, LOW_BITS))
        weight = tl.where(there, tl.exp((value - best) / temperature), 0.0).to(tl.float64)
        total = tl.sum(weight, axis=0)
        if TOP_P < 1.0:
            needed = total * TOP_P
            if MODE == "top-p":  # of everything; the values at hand must hold the share
                needed = TOP_P * tl.sum(
                    _chunk_masses(
                        chunk_max, chunk_sum, row, num_chunks, best, temperature, CHUNKS_PAD
                    ),
                    axis=0,
                )
                fits = fits & (total >= needed)
            threshold = _top_p_threshold(value_image, weight, needed, LOW_BITS)
            weight = tl.where((value_image >= threshold) | (value == best), weight, 0.0)
            total = tl.sum(weight, axis=0)
        fits = fits | is_bad
        u = _uniform(stream_key, tl.load(candidates + row), tl.load(step_at))
        index = _first_past(weight, 0.0, u * total, CAPACITY)
        token = tl.sum(tl.where(place == index, value_ids, 0), axis=0)
        tl.store(whole_row + row, (fits == 0).to(tl.uint8))
    if fits:
        column = tl.load(column_at)
        _write(
            row,
            token,
            is_bad,
            column,
            tokens,
            tokens_stride,
            last_token,
            done,
            bad,
            stop_ids,
            STOPS,
        )


@triton.jit
def whole_row_kernel(
    logits,
    logits_stride,
    whole_row,
    stream_key,
    candidates,
    step_at,
    column_at,
    tokens,
    tokens_stride,
    last_token,
    done,
    bad,
    stop_ids,
    vocab,
    k,
    temperature,
    FLAGGED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    LOW_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
):
    """One program a row, any setting: two bits of a threshold with each pass over the logits."""
    row = tl.program_id(0).to(tl.int64)
    if FLAGGED:  # noqa: SIM102 (decided by the compiler)
        if tl.load(whole_row + row) == 0:
            return
    row_logits = logits + row * logits_stride
    offset = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, vocab, BLOCK, num_stages=3):
        largest = tl.maximum(largest, _load(row_logits, first + offset, vocab))
    best = tl.max(largest, axis=0)
    is_bad = (best == float("inf")) | (best == float("-inf"))
    best = tl.where(is_bad, 0.0, best)

    threshold = tl.full([], 0, tl.uint32)
    if TOP_K:
        for level in tl.static_range((32 - LOW_BITS) // 2):
            bit = tl.full([], 1 << (30 - 2 * level), tl.uint32)
            count1 = tl.zeros([BLOCK], tl.int32)
            count2 = tl.zeros([BLOCK], tl.int32)
            count3 = tl.zeros([BLOCK], tl.int32)
            for first in tl.range(0, vocab, BLOCK, num_stages=3):
                ids = first + offset
                image = tl.where(ids < vocab, _image(_load(row_logits, ids, vocab)), 0)
                count1 += (image >= threshold + bit).to(tl.int32)
                count2 += (image >= threshold + 2 * bit).to(tl.int32)
                count3 += (image >= threshold + 3 * bit).to(tl.int32)
            reached = (tl.sum(count1, axis=0) >= k).to(tl.uint32)
            reached += (tl.sum(count2, axis=0) >= k).to(tl.uint32)
            reached += (tl.sum(count3, axis=0) >= k).to(tl.uint32)
            threshold += reached * bit

    if TOP_P < 1.0:
        masses = tl.zeros([BLOCK], tl.float64)
        for first in tl.range(0, vocab, BLOCK, num_stages=3):
            x = _load(row_logits, first + offset, vocab)
            masses += _weight(x, threshold, best, temperature)
        needed = tl.sum(masses, axis=0) * TOP_P
        p_threshold = tl.full([], 0, tl.uint32)
        for level in tl.static_range((32 - LOW_BITS) // 2):
            bit = tl.full([], 1 << (30 - 2 * level), tl.uint32)
            mass1 = tl.zeros([BLOCK], tl.float32)  # a lane adds few values: float32 is enough
            mass2 = tl.zeros([BLOCK], tl.float32)
            mass3 = tl.zeros([BLOCK], tl.float32)
            for first in tl.range(0, vocab, BLOCK, num_stages=3):
                x = _load(row_logits, first + offset, vocab)
                image, weight = _image(x), tl.exp((x - best) / temperature)
                mass1 += tl.where(image >= tl.maximum(p_threshold + bit, threshold), weight, 0.0)
                mass2 += tl.where(
                    image >= tl.maximum(p_threshold + 2 * bit, threshold), weight, 0.0
                )
                mass3 += tl.where(
                    image >= tl.maximum(p_threshold + 3 * bit, threshold), weight, 0.0
                )
            reached = (tl.sum(mass1.to(tl.float64), axis=0) >= needed).to(tl.uint32)
            reached += (tl.sum(mass2.to(tl.float64), axis=0) >= needed).to(tl.uint32)
            reached += (tl.sum(mass3.to(tl.float64), axis=0) >= needed).to(tl.uint32)
            p_threshold += reached * bit
        threshold = tl.minimum(tl.maximum(threshold, p_threshold), _image(best))

    masses = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, vocab, BLOCK, num_stages=3):
        x = _load(row_logits, first + offset, vocab)
        masses += _weight(x, threshold, best, temperature)
    target = _uniform(stream_key, tl.load(candidates + row), tl.load(step_at))
    target = target * tl.sum(masses, axis=0)
    running = tl.full([], 0.0, tl.float64)
    before = tl.full([], 0.0, tl.float64)
    block = tl.full([], -1, tl.int32)
    last_block = tl.full([], 0, tl.int32)
    for first in tl.range(0, vocab, BLOCK, num_stages=3):
        x = _load(row_logits, first + offset, vocab)
        mass = tl.sum(_weight(x, threshold, best, temperature), axis=0)
        here = (block < 0) & (running + mass > target)
        before = tl.where(here, running, before)
        block = tl.where(here, first, block)
        last_block = tl.where(mass > 0, first, last_block)
        running += mass
    block = tl.where(
        block < 0, last_block, block
    )  # rounding can leave the target just past the end
    weight = _weight(_load(row_logits, block + offset, vocab), threshold, best, temperature)
    token = block + _first_past(weight, before, target, BLOCK)
    column = tl.load(column_at)
    _write(
        row, token, is_bad, column, tokens, tokens_stride, last_token, done, bad, stop_ids, STOPS
    )

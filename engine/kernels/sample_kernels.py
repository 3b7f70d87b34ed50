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
    ends = tl.max((stops == token).to(tl.int32), axis=0) | is_bad.to(tl.int32)
    was_done = tl.load(done + row).to(tl.int32)
    tl.store(tokens + row * tokens_stride + column, token.to(tokens.dtype.element_ty))
    tl.store(last_token + row, token.to(last_token.dtype.element_ty))
    tl.store(done + row, (was_done | ends).to(tl.uint8))
    if is_bad & (was_done == 0):
        tl.store(bad + row, tl.full([], 1, tl.uint8))


@triton.jit
def group_maxima_kernel(
    logits,
    logits_stride,
    group_max,
    vocab,
    num_groups,
    programs_per_row,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    group = (tl.program_id(0) % programs_per_row) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * logits_stride + token, mask=token < vocab, other=float("-inf"))
    largest = tl.max(_clean(x), axis=1)
    tl.store(group_max + row * num_groups + group, largest, mask=group < num_groups)


@triton.jit
def pick_kernel(
    logits,
    logits_stride,
    group_max,
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
    k,
    temperature,
    GREEDY: tl.constexpr,
    TOP_P: tl.constexpr,
    LOW_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
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
    if GREEDY:
        first_group = tl.min(tl.where(largest == best, group, GROUPS_PAD), axis=0)
        ids = first_group * GROUP + in_group
        x = _load(row_logits, ids, vocab)
        token = tl.min(tl.where(x == best, ids, vocab), axis=0)
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

        fits = (count <= CAPACITY) | is_bad
        place = tl.arange(0, CAPACITY)
        there = (place < count) & (is_bad == 0)
        value = tl.load(kept_values + row * CAPACITY + place, mask=there, other=float("-inf"))
        value_ids = tl.load(kept_ids + row * CAPACITY + place, mask=there, other=0)
        value_image = _image(value)
        there = there & (value_image >= _kth_largest(value_image, k, LOW_BITS))
        weight = tl.where(there, tl.exp((value - best) / temperature), 0.0).to(tl.float64)
        if TOP_P < 1.0:
            needed = tl.sum(weight, axis=0) * TOP_P
            threshold = _top_p_threshold(value_image, weight, needed, LOW_BITS)
            weight = tl.where((value_image >= threshold) | (value == best), weight, 0.0)
        u = _uniform(stream_key, tl.load(candidates + row), tl.load(step_at))
        index = _first_past(weight, 0.0, u * tl.sum(weight, axis=0), CAPACITY)
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
    row = tl.program_id(0).to(tl.int64)
    if FLAGGED:  # noqa: SIM102 (decided by the compiler)
        if tl.load(whole_row + row) == 0:
            return
    row_logits = logits + row * logits_stride
    offset = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + offset
        x = _load(row_logits, ids, vocab)
        largest = tl.maximum(largest, x)
    best = tl.max(largest, axis=0)
    is_bad = (best == float("inf")) | (best == float("-inf"))
    safe_best = tl.where(is_bad, 0.0, best)

    digit = tl.arange(0, 16).to(tl.uint32)
    threshold = tl.full([], 0, tl.uint32)
    if TOP_K:
        for level in tl.static_range((32 - LOW_BITS) // 4):
            tried = threshold + (digit << (28 - 4 * level))
            counts = tl.zeros([16], tl.int32)
            for first in range(0, vocab, BLOCK):
                ids = first + offset
                x = _load(row_logits, ids, vocab)
                reached = (_image(x)[:, None] >= tried[None, :]) & (ids < vocab)[:, None]
                counts += tl.sum(reached.to(tl.int32), axis=0)
            chosen = tl.max(tl.where(counts >= k, digit.to(tl.int32), 0), axis=0)
            threshold += chosen.to(tl.uint32) << (28 - 4 * level)

    total = tl.full([], 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        ids = first + offset
        x = _load(row_logits, ids, vocab)
        weight = _weight(x, threshold, safe_best, temperature)
        total += tl.sum(weight, axis=0)

    if TOP_P < 1.0:
        needed = total * TOP_P
        p_threshold = tl.full([], 0, tl.uint32)
        for level in tl.static_range((32 - LOW_BITS) // 4):
            tried = p_threshold + (digit << (28 - 4 * level))
            masses = tl.zeros([16], tl.float64)
            for first in range(0, vocab, BLOCK):
                ids = first + offset
                x = _load(row_logits, ids, vocab)
                weight = _weight(x, threshold, safe_best, temperature)
                reached = _image(x)[:, None] >= tried[None, :]
                weight = tl.where(reached, weight[:, None], 0.0)
                masses += tl.sum(weight, axis=0)
            enough = (masses >= needed) | (digit == 0)
            chosen = tl.max(tl.where(enough, digit.to(tl.int32), 0), axis=0)
            p_threshold += chosen.to(tl.uint32) << (28 - 4 * level)
        threshold = tl.minimum(tl.maximum(threshold, p_threshold), _image(safe_best))
        total = tl.full([], 0.0, tl.float64)
        for first in range(0, vocab, BLOCK):
            ids = first + offset
            x = _load(row_logits, ids, vocab)
            weight = _weight(x, threshold, safe_best, temperature)
            total += tl.sum(weight, axis=0)

    target = total * _uniform(stream_key, tl.load(candidates + row), tl.load(step_at))
    running = tl.full([], 0.0, tl.float64)
    before = tl.full([], 0.0, tl.float64)
    block = tl.full([], -1, tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + offset
        x = _load(row_logits, ids, vocab)
        weight = _weight(x, threshold, safe_best, temperature)
        passed = running + tl.sum(weight, axis=0)
        here = (block < 0) & (passed > target)
        before = tl.where(here, running, before)
        block = tl.where(here, first, block)
        running = passed
    block = tl.maximum(block, 0)
    ids = block + offset
    x = _load(row_logits, ids, vocab)
    weight = _weight(x, threshold, safe_best, temperature)
    token = block + _first_past(weight, before, target, BLOCK)
    column = tl.load(column_at)
    _write(
        row, token, is_bad, column, tokens, tokens_stride, last_token, done, bad, stop_ids, STOPS
    )

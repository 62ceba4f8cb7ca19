"""What the diagnosis of each planted fault must say, where its pattern has a name.

Not here are faults that crash, that only a test sees or that are seen beside the tensors, and those of which
results are merely wrong, or NaN, as of a tensor that is read with the strides of another.
"""

from __future__ import annotations

EXPECTED: dict[str, str] = {
    # tails and bounds
    "no-length-mask-in-the-last-key-tile": "keys past the end of the last tile",
    "only-causal-scores-are-masked": "keys past the end of the last tile",
    "keys-read-past-their-end-in-dq": "right in plain memory",
    "values-read-past-their-end-in-the-forward": "right in plain memory",
    "lse-and-delta-read-past-their-end": "right in plain memory",
    "gradient-of-out-read-past-its-end-in-dkdv": "right in plain memory",
    "last-tile-of-keys-reads-the-next-head": "the next head's",
    "last-tile-of-keys-left-out": "the last tile of 16 keys were left out",
    "last-tile-of-rows-not-launched": "not written",
    # causal alignment and loop bounds
    "strictly-below-the-diagonal": "did not see the key on its diagonal",
    "mask-aligned-at-the-top-left": "a causal mask aligned at the top left",
    "keys-end-as-if-aligned-at-the-top-left": "ended where a mask aligned at the top left ends",
    "keys-end-one-too-soon": "ended one too soon",
    "keys-without-a-mask-one-too-many": "above the diagonal",
    "backward-ignores-causal": "above the diagonal",
    "backward-always-causal": "their mask were causal",
    "causal-mask-missing-in-the-forward": "the tiles on the diagonal were not masked",
    "causal-mask-missing-in-dq": "the tiles on the diagonal were not masked",
    "causal-mask-missing-in-dkdv": "the tiles on the diagonal were not masked",
    "dkdv-starts-a-tile-late": "on the diagonal, gave nothing",
    "dkdv-starts-as-if-aligned-at-the-top-left": "began where a mask aligned at the top left begins",
    "rows-of-dkdv-without-a-mask-one-too-many": "above the diagonal",
    "rows-of-dkdv-end-one-too-soon": "the last query row gave nothing",
    "every-other-tile-of-rows-in-dkdv": "every other tile of 16 query rows gave nothing",
    "dq-starts-a-tile-late": "the first tile of 16 keys were left out",
    # dead rows
    "out-of-dead-rows-divided-by-zero": "rows that see no key",
    "lse-of-dead-rows-finite": "rows that see no key",
    "lse-of-dead-rows-where-the-maximum-begins": "rows that see no key",
    "dead-rows-known-by-the-place-in-the-tile": "out is 0",
    "lse-of-dead-rows-unguarded-in-dq": "rows that see no key",
    # ragged batches
    "lse-of-another-sequence": "sequence 0 is right",
    "delta-of-the-first-sequence": "sequence 0 is right",
    "keys-begin-where-the-queries-do": "sequence 0 is right",
    "keys-of-a-sequence-without-queries-not-written": "not written",
    "rows-of-a-sequence-without-keys-not-written": "not written",
    "no-queries-no-gradients": "not written",
    "table-as-long-as-for-one-sequence": "not written",
    "tiles-of-a-sequence-counted-from-one": "not written",
    # strides
    "stride-of-the-batch-rebuilt-from-rows": "batch entry 0 is right",
    "dk-allocated-like-k-and-written-as-contiguous": "transposed",
    "dq-written-with-the-strides-of-q": "transposed",
    "lse-of-all-batch-entries-in-one-place": "not written",
    # online softmax
    "accumulator-not-rescaled": "the accumulator of out were not rescaled",
    "accumulator-rescaled-after-the-product": "the newest tile of out were rescaled",
    "sum-not-rescaled": "the sum were not rescaled",
    "maximum-not-kept": "only the last tile of 16 keys",
    "rescaled-by-exp-instead-of-exp2": "rescaled by exp of an exponent that is meant for exp2",
    # numerics and accumulators
    "lse-of-a-maximum-in-16-bit": "rounded in a lower precision",
    "k-scaled-in-16-bit-for-dk-dv": "rounded in a lower precision",
    "q-scaled-in-16-bit-for-dq": "rounded in a lower precision",
    "q-scaled-in-16-bit-in-the-forward": "rounded in a lower precision",
    "p-rounded-to-bfloat16": "rounded in a lower precision",
    "exponents-in-16-bit": "rounded in a lower precision",
    "sum-of-the-rounded-p": "rounded in a lower precision",
    "ds-rounded-to-bfloat16-for-dq": "rounded in a lower precision",
    "dp-in-float16": "rounded in a lower precision",
    "scores-in-bfloat16-in-the-backward": "rounded in a lower precision",
    "delta-from-an-out-in-bfloat16": "rounded in a lower precision",
    "delta-summed-in-float16": "rounded in a lower precision",
    "sum-in-bfloat16": "an accumulator in a low precision",
    "out-accumulated-in-float16": "an accumulator in a low precision",
    "dq-accumulated-in-bfloat16": "an accumulator in a low precision",
    "dk-accumulated-in-float16": "an accumulator in a low precision",
    "dv-accumulated-in-bfloat16": "an accumulator in a low precision",
    "truncated-to-bfloat16": "cut off where it should be rounded",
    "exp2-without-log2-e": "exp2 took an exponent that is meant for exp",
    "default-scale-of-three-decimals": "rounded to three decimals",
    # lse
    "lse-in-base-2": "it were a logarithm in base 2",
    "sum-in-base-2-maximum-in-base-e": "only the logarithm of the sum were in base 2",
    "lse-without-the-maximum": "without the maximum",
    "maximum-not-scaled-in-the-lse": "its maximum were not scaled",
    "lse-with-the-sign-of-the-scale": "its maximum had the opposite sign",
    "lse-of-one-batch-entry": "not written",
    "lse-of-a-sequence-without-keys-in-the-first-rows": "not written",
    "backward-takes-the-lse-for-base-2": "the lse were taken for one in base 2",
    "lse-of-the-kv-head-in-dk-dv": "the lse were that of the query head with the number of the KV head",
    # backward algebra
    "dk-without-scale": "1 / scale",
    "dq-without-scale": "1 / scale",
    "dq-with-the-scale-of-exp2": "1 / ln 2",
    "dv-with-scale": "the scale",
    "delta-left-out": "delta were not subtracted",
    "delta-added-for-dk": "delta were added",
    "gradient-of-the-lse-not-in-delta": "nothing flowed in through the lse",
    "gradient-of-the-lse-added-to-delta": "through the lse had the opposite sign",
    "delta-of-the-kv-head-in-dk": "delta were that of the query head with the number of the KV head",
    "dv-from-p-that-is-not-masked": "the tiles on the diagonal were not masked",
    "dv-from-ds": "dv added up dS",
    "dk-from-dp": "dk added up dP",
    "dq-of-rows-without-keys-not-written": "not written",
    # groups of heads
    "group-overwritten-instead-of-summed": "only the last query head of each group",
    "group-without-its-last-head": "the last query head of each group gave nothing",
    "kv-head-by-remainder-in-the-forward": "KV head h % (number of KV heads)",
    "kv-head-by-remainder-for-dq": "KV head h % (number of KV heads)",
    "heads-of-a-group-apart": "the query heads h, h + (number of KV heads)",
    "group-summed-in-bfloat16": "an accumulator in a low precision",
    "group-of-a-power-of-two": "only head 4 is wrong",
    "v-of-the-first-kv-head": "KV head 0, for v alone",
    # autograd plumbing
    "scale-not-kept-for-the-backward": "the backward had the default scale",
    "causal-not-kept-for-the-ragged-backward": "their mask were not causal",
    "causal-only-where-lengths-are-equal": "causal=False",
    "gradient-of-the-lse-not-passed-on": "nothing flowed in through the lse",
    # configuration and caching
    "dv-added-to-the-result-of-a-trial-run": "a constant factor of 2",
    "dq-grid-of-the-other-kernels-tiles": "not written",
}
"""By mutant: words that must occur in a sentence of its diagnosis."""

ALSO_TRUE: dict[str, tuple[str, ...]] = {
    # where one tile has all keys
    "keys-without-a-mask-one-too-many": ("as with causal=False",),
    "causal-mask-missing-in-the-forward": ("as with causal=False",),
    # of the longer sequence: aligned by the keys of all, it sees its own whole
    "causal-offset-from-all-keys": ("as with causal=False",),
    # times a scale of 1/4 what is kept in bfloat16 has no more digits
    "dq-accumulated-in-bfloat16": ("rounded to bfloat16",),
}
"""By mutant: words of other sentences that name a cause and are true of it, on a case that is small."""

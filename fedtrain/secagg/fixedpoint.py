"""Fixed point (being written): see the signatures below.

class FixedPoint:  # frozen: sites, ring_bits, value_bits (0: as many as fit), clip, max_weight
    dtype -> np.dtype of the ring; q_max; value_bits resolved
    encode_into(values, weight, seed, out, offset=0, spread=map) -> number clipped
    decode_into(total, sites, weight_sum, out, spread=map); decode(total, sites, weight_sum) -> float64
    scalar_items(count) -> ring items that `count` scalars take
    encode_scalars(values, names) -> ring vector; decode_scalars(total, sites) -> float64
"""

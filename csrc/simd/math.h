// Functions on F16 made of its operations alone, so that they round alike in every tier.
#pragma once

namespace quire::QUIRE_TIER {

// e ** x within 2 units in the last place: exactly 1 at 0, exactly 0 below -87.3 (so at -inf), inf above 88.7.
// Range reduction to |r| <= ln 2 / 2 and the Taylor polynomial of degree 7, by multiplications and additions alone.
static inline F16 exp(F16 x) {
  const F16 low = set1(-87.3f), high = set1(88.7f);
  const F16 bounded = min(high, max(low, x));  // operands in this order: NaN passes through both
  const F16 magic = set1(12582912.0f);         // 1.5 * 2 ** 23: adding it rounds to an integer
  const F16 n = (bounded * set1(1.44269504f) + magic) - magic;
  const F16 r = (bounded - n * set1(0.693359375f)) - n * set1(-2.12194440e-4f);
  F16 p = set1(1.0f / 5040.0f);
  p = p * r + set1(1.0f / 720.0f);
  p = p * r + set1(1.0f / 120.0f);
  p = p * r + set1(1.0f / 24.0f);
  p = p * r + set1(1.0f / 6.0f);
  p = p * r + set1(0.5f);
  p = p * r + set1(1.0f);
  p = p * r + set1(1.0f);
  // 2 ** n in two factors: n reaches 128.
  const F16 half = (n * set1(0.5f) + magic) - magic;
  const F16 scaled = (p * pow2(half)) * pow2(n - half);
  const F16 capped = select_less(high, x, set1(__builtin_inff()), scaled);
  return select_less(x, low, zero(), capped);
}

// x / (1 + e ** -x).
static inline F16 silu(F16 x) { return x / (set1(1.0f) + exp(zero() - x)); }

}  // namespace quire::QUIRE_TIER

// --- attention ---
namespace quire::QUIRE_TIER {

// Within 2 ** -22 of tanh(x).
static inline F16 tanh(F16 x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

}  // namespace quire::QUIRE_TIER

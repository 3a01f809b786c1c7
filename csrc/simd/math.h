// Functions on F16 made of its operations alone, so that they round alike in every tier.
#pragma once

namespace quire::QUIRE_TIER {

// The nearest integer, of numbers below 2 ** 22: 1.5 * 2 ** 23 has no room for a fraction.
static inline F16 rounded_to_integer(F16 x) {
  const F16 magic = set1(12582912.0f);
  return (x + magic) - magic;
}

// e ** x as mantissa * 2 ** exponent, the mantissa near [0.7, 1.42]; |x| is at most 128.
// Range reduction to |r| <= ln 2 / 2 and the Taylor polynomial of degree 7, by multiplications and additions alone.
struct ExpParts {
  F16 mantissa, exponent;
};
static inline ExpParts exp_parts(F16 x) {
  const F16 n = rounded_to_integer(x * set1(1.44269504f));
  const F16 r = (x - n * set1(0.693359375f)) - n * set1(-2.12194440e-4f);
  F16 p = set1(1.0f / 5040.0f);
  p = p * r + set1(1.0f / 720.0f);
  p = p * r + set1(1.0f / 120.0f);
  p = p * r + set1(1.0f / 24.0f);
  p = p * r + set1(1.0f / 6.0f);
  p = p * r + set1(0.5f);
  p = p * r + set1(1.0f);
  p = p * r + set1(1.0f);
  return {p, n};
}

// e ** x within 2 units in the last place: exactly 1 at 0, exactly 0 below -87.3 (so at -inf), inf above 88.7.
static inline F16 exp(F16 x) {
  const F16 low = set1(-87.3f), high = set1(88.7f);
  const ExpParts parts = exp_parts(min(high, max(low, x)));  // operands in this order: NaN passes through both
  // 2 ** exponent in two factors: it reaches 128.
  const F16 half = rounded_to_integer(parts.exponent * set1(0.5f));
  const F16 scaled = (parts.mantissa * pow2(half)) * pow2(parts.exponent - half);
  const F16 capped = select_less(high, x, set1(__builtin_inff()), scaled);
  return select_less(x, low, zero(), capped);
}

// 1 / (1 + e ** -x).
static inline F16 sigmoid(F16 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

// x / (1 + e ** -x).
static inline F16 silu(F16 x) { return x / (set1(1.0f) + exp(zero() - x)); }

// --- elementwise ---
static inline F16 abs(F16 x) { return max(x, zero() - x); }

// log(1 + e ** x) within 3 units in the last place; NaN stays NaN.
// With u = e ** -|x|: log(1 + u) = 2 artanh(u / (2 + u)), whose argument is at most 1 / 3, by its series.
static inline F16 softplus(F16 x) {
  const F16 u = exp(zero() - abs(x));
  const F16 s = u / (u + set1(2.0f)), square = s * s;
  F16 p = set1(1.0f / 15.0f);
  p = p * square + set1(1.0f / 13.0f);
  p = p * square + set1(1.0f / 11.0f);
  p = p * square + set1(1.0f / 9.0f);
  p = p * square + set1(1.0f / 7.0f);
  p = p * square + set1(1.0f / 5.0f);
  p = p * square + set1(1.0f / 3.0f);
  p = p * square + set1(1.0f);
  return max(zero(), x) + (s + s) * p;  // in this order: NaN passes through
}

// The normal distribution function, (1 + erf(x / sqrt(2))) / 2, within 2e-7; NaN stays NaN.
// Source: Abramowitz and Stegun 1964 (Handbook of Mathematical Functions), 7.1.26.
static inline F16 normal_cdf(F16 x) {
  const F16 one = set1(1.0f), z = abs(x) * set1(0.70710678f);
  const F16 t = one / (one + set1(0.3275911f) * z);
  F16 p = set1(1.061405429f);
  p = p * t + set1(-1.453152027f);
  p = p * t + set1(1.421413741f);
  p = p * t + set1(-0.284496736f);
  p = p * t + set1(0.254829592f);
  const F16 tail = set1(0.5f) * (p * t * exp(zero() - z * z));
  return select_less(x, zero(), tail, one - tail);
}

// (1 + tanh(y)) / 2 is 1 / (1 + e ** -2y): no digits are lost where tanh nears -1.
static inline F16 gelu_tanh(F16 x) {
  const F16 y = set1(0.79788456f) * (x + set1(0.044715f) * (x * x * x));
  return x / (set1(1.0f) + exp(set1(-2.0f) * y));
}
static inline F16 gelu(F16 x) { return x * normal_cdf(x); }

}  // namespace quire::QUIRE_TIER

// --- attention ---
namespace quire::QUIRE_TIER {

// 2 ** x for x <= 0 within 2 ** -13 of itself, for weights that are rounded to bfloat16: exactly 1 at 0, exactly 0
// below -125. Half the instructions of `exp`: a polynomial of degree 3 for |r| <= 1 / 2 (least largest relative error).
// Of N at once, step by step: one alone would wait for its own results.
template <int N>
static inline void exp2_coarse_inplace(F16 (&x)[N]) {
  const F16 low = set1(-125.0f), magic = set1(12582912.0f);
  F16 shifted[N], r[N], p[N];
  for (int i = 0; i < N; ++i) shifted[i] = x[i] + magic;
  for (int i = 0; i < N; ++i) r[i] = x[i] - (shifted[i] - magic);
  for (int i = 0; i < N; ++i) p[i] = set1(0.055008933f) * r[i] + set1(0.242211f);
  for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + set1(0.6932829f);
  for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + set1(1.0f);
  for (int i = 0; i < N; ++i) x[i] = add_to_exponent_or_zero(p[i], shifted[i], x[i], low);
}

// Within 2 ** -22 of tanh(x).
static inline F16 tanh(F16 x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

}  // namespace quire::QUIRE_TIER

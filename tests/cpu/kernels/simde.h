// AVX-512 through SIMDe on a CPU without it, with the intrinsics that SIMDe 0.7 lacks.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

// A function over lanes: RESULT f(ARGUMENT x), each lane through EXPRESSION.
#define EMULATE(NAME, RESULT, TO, ARGUMENT, FROM, LANES, EXPRESSION) \
  static inline RESULT emulated_##NAME(ARGUMENT x) {                 \
    FROM in[LANES];                                                  \
    TO out[LANES];                                                   \
    memcpy(in, &x, sizeof in);                                       \
    for (int i = 0; i < LANES; i++) out[i] = (TO)(EXPRESSION);       \
    RESULT result;                                                   \
    memcpy(&result, out, sizeof result);                             \
    return result;                                                   \
  }

EMULATE(cvtepi32_epi16, __m256i, int16_t, __m512i, int32_t, 16, in[i])
EMULATE(cvtepi32_epi8, __m128i, int8_t, __m512i, int32_t, 16, in[i])
EMULATE(cvtepi32_ps, __m512, float, __m512i, int32_t, 16, in[i])
EMULATE(cvtepi8_epi32, __m512i, int32_t, __m128i, int8_t, 16, in[i])
EMULATE(cvtepu8_epi32, __m512i, int32_t, __m128i, uint8_t, 16, in[i])
EMULATE(cvtepu16_epi32, __m512i, int32_t, __m256i, uint16_t, 16, in[i])
EMULATE(cvtpd_ps, __m256, float, __m512d, double, 8, in[i])
EMULATE(cvtps_epi32, __m512i, int32_t, __m512, float, 16, fabsf(in[i]) < 2147483648.0f ? (int32_t)rintf(in[i]) : INT32_MIN)
EMULATE(cvtps_pd, __m512d, double, __m256, float, 8, in[i])

static inline __m512 emulated_cvtph_ps(__m256i x) {
  __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
  __m512 result;
  memcpy(&result, halves, sizeof result);
  return result;
}

// SIMDe multiplies by 2^y, which may overflow where the product does not.
static inline __m512 emulated_scalef_ps(__m512 x, __m512 y) {
  float lanes[16], powers[16];
  memcpy(lanes, &x, sizeof lanes);
  memcpy(powers, &y, sizeof powers);
  for (int i = 0; i < 16; i++) {
    const float power = fmaxf(-999.0f, fminf(999.0f, floorf(powers[i])));
    lanes[i] = powers[i] == powers[i] ? scalbnf(lanes[i], (int)power) : powers[i];
  }
  memcpy(&x, lanes, sizeof lanes);
  return x;
}

static inline __m512i emulated_srai_epi32(__m512i x, int count) {
  int32_t lanes[16];
  memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < 16; i++) lanes[i] >>= count;
  memcpy(&x, lanes, sizeof lanes);
  return x;
}

static inline __m256i emulated_cvtps_ph(__m512 x) {
  __m256 halves[2];
  memcpy(halves, &x, sizeof halves);
  __m128i packed[2] = {_mm256_cvtps_ph(halves[0], 0), _mm256_cvtps_ph(halves[1], 0)};  // to nearest even
  __m256i result;
  memcpy(&result, packed, sizeof result);
  return result;
}

static inline __m512 emulated_maskz_loadu_ps(__mmask16 mask, const void *p) {
  float lanes[16] = {0};
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) memcpy(lanes + i, (const float *)p + i, 4);
  return _mm512_loadu_ps(lanes);
}

static inline void emulated_mask_storeu_ps(void *p, __mmask16 mask, __m512 x) {
  float lanes[16];
  _mm512_storeu_ps(lanes, x);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) memcpy((float *)p + i, lanes + i, 4);
}

#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtpd_ps emulated_cvtpd_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvtps_pd emulated_cvtps_pd
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_ph(x, rounding) emulated_cvtps_ph(x)
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_srai_epi32 emulated_srai_epi32
#undef _mm512_scalef_ps
#define _mm512_scalef_ps emulated_scalef_ps

// One CPU feature, run for real: exit status 0 when its instructions execute and give the right result. Compiled once
// per feature with that feature's flags and -DPROBE_<feature>; a trap (SIGILL) is the answer "no".

#if defined(PROBE_AMX_INT8)
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// volatile: the compiler can neither fold the computation nor drop it
static volatile int   one_i = 1;
static volatile float one_f = 1.0f;

#if defined(PROBE_SSE42)
static bool probe() {
    return _mm_crc32_u8(0, (unsigned char) one_i) == 0xf26b8303u;
}
#elif defined(PROBE_AVX)
static bool probe() {
    float out[8];
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_set1_ps(one_f), _mm256_set1_ps(one_f)));
    return out[0] == 2.0f && out[7] == 2.0f;
}
#elif defined(PROBE_F16C)
static bool probe() {
    return _cvtsh_ss(_cvtss_sh(one_f, 0)) == 1.0f;
}
#elif defined(PROBE_FMA)
static bool probe() {
    const __m128 x = _mm_set1_ps(one_f);
    return _mm_cvtss_f32(_mm_fmadd_ps(x, x, x)) == 2.0f;
}
#elif defined(PROBE_BMI2)
static bool probe() {
    return _pext_u32(0xf0u * (unsigned) one_i, 0xf0u) == 0xfu;
}
#elif defined(PROBE_AVX2)
static bool probe() {
    const __m256i x = _mm256_set1_epi8((char) one_i);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_abs_epi8(x), x)) == -1;
}
#elif defined(PROBE_AVX_VNNI)
static bool probe() {
    const __m256i x = _mm256_set1_epi8((char) one_i);
    int32_t       out[8];
    _mm256_storeu_si256((__m256i *) out, _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), x, x));
    return out[0] == 4 && out[7] == 4;
}
#elif defined(PROBE_AVX512)
static bool probe() {
    const __m512  x = _mm512_and_ps(_mm512_set1_ps(one_f), _mm512_set1_ps(one_f)); // DQ
    const __m512i y = _mm512_conflict_epi32(_mm512_set1_epi32(one_i));             // CD
    const __m512i z = _mm512_adds_epi8(_mm512_set1_epi8((char) one_i), y);         // BW
    const __m256i u = _mm256_ternarylogic_epi32(_mm512_castsi512_si256(z), _mm512_castsi512_si256(y),
            _mm512_castsi512_si256(y), 0xf0);  // VL: first operand
    return _mm512_reduce_add_ps(x) == 16.0f && (_mm256_extract_epi32(u, 0) & 0xff) == 1;
}
#elif defined(PROBE_AVX512_VBMI)
static bool probe() {
    uint8_t out[64];
    _mm512_storeu_si512(out, _mm512_permutexvar_epi8(_mm512_setzero_si512(), _mm512_set1_epi8((char) one_i)));
    return out[0] == 1 && out[63] == 1;
}
#elif defined(PROBE_AVX512_VNNI)
static bool probe() {
    const __m512i x = _mm512_set1_epi8((char) one_i);
    return _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), x, x)) == 64;
}
#elif defined(PROBE_AVX512_BF16)
static bool probe() {
    const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(one_f), _mm512_set1_ps(one_f));
    return _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), x, x)) == 32.0f;
}
#elif defined(PROBE_AMX_INT8)
// These declare that _tile_loadconfig() reads 8 of its 64 bytes (GCC bug 114098), and the optimiser drops the stores to the
// others: seen with 12.2 in ggml's kernels, whose first tile load then traps. Whether it strikes depends on the code
// around, so that a probe that runs proves nothing.
#    if defined(__GNUC__) && !defined(__clang__) && \
            (__GNUC__ < 11 || (__GNUC__ == 11 && __GNUC_MINOR__ < 5) || (__GNUC__ == 12 && __GNUC_MINOR__ < 4) || (__GNUC__ == 13 && __GNUC_MINOR__ < 3))
#        error "this compiler breaks _tile_loadconfig()"
#    endif

struct tile_config {
    uint8_t  palette_id   = 0;
    uint8_t  start_row    = 0;
    uint8_t  reserved[14] = {};
    uint16_t colsb[16]    = {};
    uint8_t  rows[16]     = {};
};

static bool probe() {
    // the kernel hands out tile data on request (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) {
        return false;
    }
    int8_t  a[16][64];
    int32_t c[16][16];
    memset(a, one_i, sizeof(a));

    tile_config config;
    config.palette_id = 1;
    for (int i = 0; i < 3; ++i) {
        config.rows[i]  = 16;
        config.colsb[i] = 64;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_loadd(1, a, 64);
    _tile_loadd(2, a, 64);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, c, 64);
    _tile_release();
    return c[0][0] == 64 && c[15][15] == 64;
}
#endif

int main() {
    return probe() ? 0 : 1;
}

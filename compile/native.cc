// Products of activations with weights in blocks of few bits, as GGUF files store them, for XLA's CPU.
//
// Sixteen rows (outputs) of a weight make a tile, whose blocks lie transposed (blocks.py): one field of all rows, then
// the next, so that a vector holds the same field of sixteen rows and no sum over lanes is needed. Codes are widened in
// registers only. Activations are float, or 8-bit integers in groups of 32 with a scale each.
//
// Vectors are those of GCC and Clang (vector_size), which any processor can run; what they can't say has a form for
// AVX-512 VNNI, one for AVX2 and a portable one. The compiler is told the processor, so the choice is made when it runs.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kTile = 16;   // rows of a tile: the lanes of a vector
constexpr int kGroup = 32;  // activations with one scale
constexpr int kSum = 16;    // activations of one sum

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Bytes = uint8_t __attribute__((vector_size(64)));

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define RZOO_AVX512 1
#elif defined(__AVX2__) && defined(__F16C__)
#define RZOO_AVX2 1
#endif

template <typename T>
inline T load(const void* from) {
  T out;
  std::memcpy(&out, from, sizeof(T));
  return out;
}

template <typename To, typename From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &from, sizeof(To));
  return out;
}

template <typename T>
T plus(T a, T b) {
  return a + b;
}

template <typename T>
T larger(T a, T b) {
  return a > b ? a : b;
}

inline Floats magnitude(Floats x) { return bits<Floats>(bits<Ints>(x) & 0x7fffffff); }

// All lanes of a vector as one number.
template <typename Vector, typename T>
inline T folded(Vector vector, T (*both)(T, T)) {
  T lanes[kTile];
  std::memcpy(lanes, &vector, sizeof(vector));
  for (int width = kTile / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = both(lanes[i], lanes[i + width]);
  return lanes[0];
}

// One float16 of each row.
inline Floats halves(const uint8_t* from) {
#if RZOO_AVX512
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif RZOO_AVX2
  struct { __m256 low, high; } both = {_mm256_cvtph_ps(load<__m128i>(from)), _mm256_cvtph_ps(load<__m128i>(from + 16))};
  return bits<Floats>(both);
#else
  Floats out;
  for (int i = 0; i < kTile; ++i) {
    uint32_t h = load<uint16_t>(from + 2 * i), exponent = h >> 10 & 31, rest = (h & 0x7fff) << 13;
    float wide = bits<float>(exponent == 31 ? rest | 0x7f800000u : rest);
    out[i] = (exponent == 31 ? wide : wide * 0x1p112f) * (h >> 15 ? -1.0f : 1.0f);
  }
  return out;
#endif
}

typedef uint8_t Sixteen __attribute__((vector_size(kTile)));
typedef int8_t SignedSixteen __attribute__((vector_size(kTile)));

// Adds the products of four codes of each row with four activations. Unsigned codes are at most 63.
template <bool kSigned>
inline Ints dot4(Ints sum, Bytes codes, int32_t x) {
#if RZOO_AVX512
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif RZOO_AVX2
  struct Two { __m256i part[2]; };
  Two total = bits<Two>(sum), code = bits<Two>(codes);
  for (int i = 0; i < 2; ++i) {
    __m256i four = _mm256_set1_epi32(x), magnitude = code.part[i];
    if (kSigned) {
      four = _mm256_sign_epi8(four, code.part[i]);
      magnitude = _mm256_abs_epi8(code.part[i]);
    }
    __m256i pairs = _mm256_maddubs_epi16(magnitude, four);
    total.part[i] = _mm256_add_epi32(total.part[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return bits<Ints>(total);
#else
  for (int i = 0; i < 4; ++i) {
    int32_t of_x = (int8_t)(x >> 8 * i);
    Ints code = kSigned ? (Ints)(bits<Ints>(codes) << (24 - 8 * i)) >> 24 : bits<Ints>(codes) >> 8 * i & 255;
    sum += code * of_x;
  }
  return sum;
#endif
}

#if RZOO_AVX512
constexpr int kFlip = 128;  // VNNI takes unsigned codes: signed ones are moved by this, and the sum of x back
#else
constexpr int kFlip = 0;
#endif

// kGroup values of a row of x, prepared for all tiles: value = q * scale. sums: those of each kSum values; sum: of all.
struct IntegerGroup {
  int8_t q[kGroup];
  float scale, sum, sums[2];

  // Rounds to the nearest multiples of the largest magnitude / 127.
  explicit IntegerGroup(const float* x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers, in the low bits
    Floats v[2] = {load<Floats>(x), load<Floats>(x + 16)};
    float largest = folded(larger(magnitude(v[0]), magnitude(v[1])), larger<float>);
    float odd = folded(v[0] * 0.0f + v[1] * 0.0f, plus<float>);  // NaN where x has one, or infinity: it is not hidden
    float to_integer = largest > 0 ? 127.0f / largest : 0.0f;
    scale = largest / 127.0f + odd;
    for (int half = 0; half < 2; ++half) {
      Ints rounded = bits<Ints>(v[half] * to_integer + kRound) - 0x4B400000;
      SignedSixteen narrow = __builtin_convertvector(rounded, SignedSixteen);
      std::memcpy(q + kSum * half, &narrow, kSum);
      sums[half] = scale * (float)folded(rounded, plus<int32_t>);
    }
    sum = sums[0] + sums[1];
  }

  // The products of four codes in each of N vectors with the values from `first` on.
  template <bool kSigned, int N>
  inline Floats dot(const Bytes* codes, int first) const {
    Ints even{}, odd{};
#pragma GCC unroll 4
    for (int i = 0; i < N; i += 2) {
      Bytes a = codes[i], b = codes[i + 1];
      if (kSigned && kFlip) a ^= kFlip, b ^= kFlip;
      even = dot4<kSigned>(even, a, load<int32_t>(q + first + 4 * i));
      odd = dot4<kSigned>(odd, b, load<int32_t>(q + first + 4 * i + 4));
    }
    Floats out = __builtin_convertvector(even + odd, Floats) * scale;
    return kSigned && kFlip ? out - (float)kFlip * (N == 8 ? sum : sums[first / kSum]) : out;
  }
};

// The same with the values as they are.
struct FloatGroup {
  float x[kGroup];
  float sum, sums[2];

  explicit FloatGroup(const float* from) {
    std::memcpy(x, from, sizeof(x));
    for (int half = 0; half < 2; ++half) sums[half] = folded(load<Floats>(x + kSum * half), plus<float>);
    sum = sums[0] + sums[1];
  }

  template <bool kSigned, int N>
  inline Floats dot(const Bytes* codes, int first) const {
    Floats out[4] = {};
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      Ints four = bits<Ints>(codes[i]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Ints code = kSigned ? (four << (24 - 8 * j)) >> 24 : four >> 8 * j & 255;
        out[j] += __builtin_convertvector(code, Floats) * x[first + 4 * i + j];
      }
    }
    return (out[0] + out[1]) + (out[2] + out[3]);
  }
};

// Adds 4 * N weights, scale * code + offset, times the activations of R rows: a group of each, from its `first` on.
template <bool kSigned, int N, bool kOffset, int R, typename Group>
inline void add(Floats* total, const Bytes* codes, Floats scale, Floats offset, const Group* x, int first = 0) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    total[r] += x[r].template dot<kSigned, N>(codes, first) * scale;
    if (kOffset) total[r] += offset * (N == 8 ? x[r].sum : x[r].sums[first / kSum]);
  }
}

// The low halves of `count` vectors, then their high halves.
inline void halve(const uint8_t* from, int count, Bytes* codes) {
  for (int i = 0; i < count; ++i) {
    Bytes both = load<Bytes>(from + 64 * i);
    codes[i] = both & 15;
    codes[count + i] = both >> 4;
  }
}

// Block types: `bytes` of a tile's block of `values` columns, and its products.
struct Q4_0 {
  static constexpr int values = 32, bytes = 18 * kTile;
  template <int R, typename Group>
  static inline void multiply(const uint8_t* block, const Group* x, Floats* total) {
    Bytes codes[8];
    halve(block + 32, 4, codes);
    Floats scale = halves(block);
    add<false, 8, true, R>(total, codes, scale, scale * -8.0f, x);
  }
};

struct Q4_1 {
  static constexpr int values = 32, bytes = 20 * kTile;
  template <int R, typename Group>
  static inline void multiply(const uint8_t* block, const Group* x, Floats* total) {
    Bytes codes[8];
    halve(block + 64, 4, codes);
    add<false, 8, true, R>(total, codes, halves(block), halves(block + 32), x);
  }
};

struct Q8_0 {
  static constexpr int values = 32, bytes = 34 * kTile;
  template <int R, typename Group>
  static inline void multiply(const uint8_t* block, const Group* x, Floats* total) {
    Bytes codes[8];
    for (int i = 0; i < 8; ++i) codes[i] = load<Bytes>(block + 32 + 64 * i);
    add<true, 8, false, R>(total, codes, halves(block), Floats{}, x);
  }
};

struct Q4_K {
  static constexpr int values = 256, bytes = 144 * kTile;
  template <int R, typename Group>
  static inline void multiply(const uint8_t* block, const Group* x, Floats* total) {
    Floats scale = halves(block), minimum = -halves(block + 32);
    const uint8_t *packed = block + 64, *nibbles = block + 16 * kTile;
    auto byte = [&](int i) { return load<Sixteen>(packed + kTile * i); };
    auto group = [&](int i, const Bytes* codes) {
      Sixteen s = i < 4 ? byte(i) & 63 : (byte(i + 4) & 15) | (byte(i - 4) >> 6) << 4;
      Sixteen m = i < 4 ? byte(i + 4) & 63 : byte(i + 4) >> 4 | (byte(i) >> 6) << 4;
      Floats scales = __builtin_convertvector(s, Floats) * scale, minima = __builtin_convertvector(m, Floats) * minimum;
      add<false, 8, true, R>(total, codes, scales, minima, x + R * i);
    };
    for (int i = 0; i < 8; i += 2) {
      Bytes codes[16];
      halve(nibbles + 256 * i, 8, codes);
      group(i, codes);
      group(i + 1, codes + 8);
    }
  }
};

struct Q6_K {
  static constexpr int values = 256, bytes = 210 * kTile;
  template <int R, typename Group>
  static inline void multiply(const uint8_t* block, const Group* x, Floats* total) {
    const uint8_t *upper = block + 128 * kTile, *packed = block + 192 * kTile;
    Floats scale = halves(block + 208 * kTile);
    for (int i = 0; i < 16; ++i) {  // groups of 16 columns, four vectors of codes
      int half = i / 8, part = i % 8;
      Bytes codes[4];
      for (int j = 0; j < 4; ++j) {
        Bytes low = load<Bytes>(block + 64 * (16 * half + 4 * (part % 4) + j)) >> (part < 4 ? 0 : 4) & 15;
        Bytes high = load<Bytes>(upper + 64 * (8 * half + 4 * (part % 2) + j)) >> 2 * (part / 2) & 3;
        codes[j] = low | high << 4;
      }
      Floats scales = __builtin_convertvector(load<SignedSixteen>(packed + kTile * i), Floats) * scale;
      add<false, 4, true, R>(total, codes, scales, scales * -32.0f, x + R * (i / 2), kSum * (i % 2));
    }
  }
};

// One tile by R rows of x: out[r * stride + row of the tile], of which the first `width` are there.
template <typename Block, int R, typename Group>
void tile_by_rows(const uint8_t* tile, const Group* x, int k, float* out, int64_t stride, int width) {
  Floats total[R] = {};
  for (int at = 0; at < k; at += Block::values, tile += Block::bytes, x += R * (Block::values / kGroup))
    Block::template multiply<R>(tile, x, total);
  for (int r = 0; r < R; ++r) std::memcpy(out + r * stride, &total[r], width * sizeof(float));
}

// A panel of `rows` rows of x, 8, 4, 2 or 1, whose groups lie side by side.
template <typename Block, typename Group>
void tile_by_panel(const uint8_t* tile, const Group* x, int rows, int k, float* out, int64_t stride, int width) {
  auto by = rows == 8   ? tile_by_rows<Block, 8, Group>
            : rows == 4 ? tile_by_rows<Block, 4, Group>
            : rows == 2 ? tile_by_rows<Block, 2, Group>
                        : tile_by_rows<Block, 1, Group>;
  by(tile, x, k, out, stride, width);
}

int panel_rows(int rows) { return rows >= 8 ? 8 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1; }

template <typename Group>
using TileByPanel = void (*)(const uint8_t*, const Group*, int, int, float*, int64_t, int);

struct Kind {
  int values, bytes;
  TileByPanel<IntegerGroup> integer;
  TileByPanel<FloatGroup> exact;
};

template <typename Block>
constexpr Kind kind_of() {
  return {Block::values, Block::bytes, tile_by_panel<Block, IntegerGroup>, tile_by_panel<Block, FloatGroup>};
}

// In the order of KINDS in blocks.py.
constexpr Kind kKinds[] = {kind_of<Q4_0>(), kind_of<Q4_1>(), kind_of<Q8_0>(), kind_of<Q4_K>(), kind_of<Q6_K>()};

// The groups of x in the order in which panels read them.
template <typename Group>
void prepare(const float* x, int m, int k, std::vector<Group>* out) {
  out->clear();
  out->reserve((size_t)m * (k / kGroup));
  for (int first = 0, rows; first < m; first += rows) {
    rows = panel_rows(m - first);
    for (int at = 0; at < k; at += kGroup)
      for (int r = 0; r < rows; ++r) out->emplace_back(x + (size_t)(first + r) * k + at);
  }
}

struct Weight {
  const uint8_t* tiles;
  const Kind* kind;
  float* out;
  int64_t outputs, count;  // rows of the weight, and its tiles
};

// Work on the tiles of one call, shared with the helpers, who may come after it is over.
struct Job {
  std::vector<Weight> weights;
  const IntegerGroup* integer;  // one of the two
  const FloatGroup* exact;
  int m, k;
  int64_t total, piece, pieces;
  std::atomic<int64_t> next{0}, done{0};

  void run() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces; done.fetch_add(1)) {
      int64_t stop = std::min(total, (i + 1) * piece);
      for (int64_t t = i * piece; t < stop; ++t) one(t);
    }
  }

  void one(int64_t t) {
    const Weight* w = weights.data();
    for (; t >= w->count; ++w) t -= w->count;
    const uint8_t* tile = w->tiles + t * (k / w->kind->values) * w->kind->bytes;
    int width = (int)std::min<int64_t>(kTile, w->outputs - t * kTile);
    for (int first = 0, rows; first < m; first += rows) {
      rows = panel_rows(m - first);
      int64_t groups = (int64_t)first * (k / kGroup);
      float* out = w->out + first * w->outputs + t * kTile;
      if (integer)
        w->kind->integer(tile, integer + groups, rows, k, out, w->outputs, width);
      else
        w->kind->exact(tile, exact + groups, rows, k, out, w->outputs, width);
    }
  }
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

constexpr int64_t kPieceBytes = 32 << 10;  // of weights that a thread takes at a time, where there are few rows

ffi::Error multiply(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                    ffi::Span<const int32_t> kinds, bool integer) {
  auto x = arguments.get<ffi::Buffer<ffi::F32>>(0);
  if (!x.has_value() || x->dimensions().size() != 2) return ffi::Error::InvalidArgument("x must be float32 [m, k]");
  auto job = std::make_shared<Job>();
  job->m = (int)x->dimensions()[0], job->k = (int)x->dimensions()[1], job->total = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    auto tiles = arguments.get<ffi::Buffer<ffi::U8>>(i + 1);
    auto out = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!tiles.has_value() || !out.has_value() || kinds[i] < 0 || kinds[i] >= (int)std::size(kKinds))
      return ffi::Error::InvalidArgument("each weight is uint8 tiles of a known kind, each result float32");
    const Kind& kind = kKinds[kinds[i]];
    int64_t outputs = (*out)->dimensions()[1], count = (outputs + kTile - 1) / kTile;
    if (job->k % kind.values || (int64_t)tiles->element_count() != count * (job->k / kind.values) * kind.bytes)
      return ffi::Error::InvalidArgument("tiles and x do not fit each other");
    job->weights.push_back({tiles->typed_data(), &kind, (*out)->typed_data(), outputs, count});
    job->total += count;
    bytes += tiles->element_count();
  }
  static thread_local std::vector<IntegerGroup> integers;
  static thread_local std::vector<FloatGroup> floats;
  integer ? prepare(x->typed_data(), job->m, job->k, &integers) : prepare(x->typed_data(), job->m, job->k, &floats);
  job->integer = integer ? integers.data() : nullptr, job->exact = floats.data();
  int64_t tile_bytes = std::max<int64_t>(1, bytes / std::max<int64_t>(1, job->total));
  job->piece = std::max<int64_t>(1, kPieceBytes / tile_bytes / std::max(1, job->m / 8));
  job->pieces = (job->total + job->piece - 1) / job->piece;
  int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, job->pieces - 1);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->run(); });
  job->run();
  while (job->done.load(std::memory_order_acquire) < job->pieces) pause();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(rzoo_multiply, multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int32_t>>("kinds")
                                  .Attr<bool>("integer"));

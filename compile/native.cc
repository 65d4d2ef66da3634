// Products of activations with weights in blocks of few bits, as GGUF files store them, for XLA's CPU.
//
// Sixteen rows (outputs) of a weight make a tile, whose blocks lie transposed (blocks.py): one field of all rows, then
// the next, so that a vector holds the same field of sixteen rows and no sum over lanes is needed. Codes are widened in
// registers only. Activations are float, or 8-bit integers in groups of 32 with a scale each.
//
// Vectors are those of GCC and Clang (vector_size), which any processor can run; what they can't say has a form for
// AVX-512 VNNI, one for AVX2 and a portable one. The compiler is told the processor, so the choice is made when it runs.

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
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
constexpr int kAhead = 4096;  // bytes of a weight that are asked for before they are read

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
  for (int at = 0; at < k; at += Block::values, tile += Block::bytes, x += R * (Block::values / kGroup)) {
    for (int line = 0; line < Block::bytes; line += 64) __builtin_prefetch(tile + kAhead + line);
    Block::template multiply<R>(tile, x, total);
  }
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

// Pieces of work, shared with helpers who may come after it is over.
struct Job {
  std::function<void(int64_t)> one;
  int64_t pieces;
  std::atomic<int64_t> next{0}, done{0};

  void run() {
    for (int64_t i; (i = next.fetch_add(1)) < pieces; done.fetch_add(1)) one(i);
  }
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Helpers are tasks of XLA's pool. Waking one takes as long as a small product, and the next product is a few
// microseconds away, so that one which has nothing to do looks for another job for a while before it ends.
class Helpers {
 public:
  void post(ffi::ThreadPool& pool, std::shared_ptr<Job> job, int64_t wanted) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
    }
    posted_.fetch_add(1);
    for (int64_t i = looking_.load(); i < wanted; ++i) pool.Schedule([this, job] { help(job); });
  }

 private:
  static constexpr auto kPatience = std::chrono::microseconds(60);

  void help(std::shared_ptr<Job> job) {
    while (job) {
      uint64_t seen = posted_.load();
      job->run();
      job = another(seen);
    }
  }

  std::shared_ptr<Job> another(uint64_t seen) {
    looking_.fetch_add(1);
    auto until = std::chrono::steady_clock::now() + kPatience;
    while (posted_.load() == seen && std::chrono::steady_clock::now() < until) pause();
    looking_.fetch_sub(1);
    std::lock_guard<std::mutex> lock(mutex_);
    return posted_.load() == seen ? nullptr : job_;
  }

  std::mutex mutex_;
  std::shared_ptr<Job> job_;
  std::atomic<uint64_t> posted_{0};
  std::atomic<int64_t> looking_{0};
};

// Calls one(0) to one(pieces - 1), on this thread and those of the pool; returns when all are done.
void in_parallel(ffi::ThreadPool& pool, int64_t pieces, std::function<void(int64_t)> one) {
  static auto* helpers = new Helpers;  // never destroyed: a helper may outlive main
  auto job = std::make_shared<Job>();
  job->one = std::move(one), job->pieces = pieces;
  int64_t wanted = std::min<int64_t>(pool.num_threads(), pieces) - 1;
  if (wanted > 0) helpers->post(pool, job, wanted);
  job->run();
  while (job->done.load(std::memory_order_acquire) < pieces) pause();
}

// x by several weights.
struct Products {
  std::vector<Weight> weights;
  const IntegerGroup* integer;  // one of the two
  const FloatGroup* exact;
  int m, k;
  int64_t tiles;

  void one(int64_t t) const {
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

constexpr int64_t kPieceBytes = 128 << 10;  // of weights that a thread takes at a time, where there are few rows

ffi::Error multiply(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                    ffi::Span<const int32_t> kinds, bool integer) {
  auto x = arguments.get<ffi::Buffer<ffi::F32>>(0);
  if (!x.has_value() || x->dimensions().size() != 2) return ffi::Error::InvalidArgument("x must be float32 [m, k]");
  Products all{{}, nullptr, nullptr, (int)x->dimensions()[0], (int)x->dimensions()[1], 0};
  int64_t bytes = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    auto tiles = arguments.get<ffi::Buffer<ffi::U8>>(i + 1);
    auto out = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!tiles.has_value() || !out.has_value() || kinds[i] < 0 || kinds[i] >= (int)std::size(kKinds))
      return ffi::Error::InvalidArgument("each weight is uint8 tiles of a known kind, each result float32");
    const Kind& kind = kKinds[kinds[i]];
    int64_t outputs = (*out)->dimensions()[1], count = (outputs + kTile - 1) / kTile;
    if (all.k % kind.values || (int64_t)tiles->element_count() != count * (all.k / kind.values) * kind.bytes)
      return ffi::Error::InvalidArgument("tiles and x do not fit each other");
    all.weights.push_back({tiles->typed_data(), &kind, (*out)->typed_data(), outputs, count});
    all.tiles += count;
    bytes += tiles->element_count();
  }
  static thread_local std::vector<IntegerGroup> integers;
  static thread_local std::vector<FloatGroup> floats;
  integer ? prepare(x->typed_data(), all.m, all.k, &integers) : prepare(x->typed_data(), all.m, all.k, &floats);
  all.integer = integer ? integers.data() : nullptr, all.exact = floats.data();
  int64_t piece = std::max<int64_t>(1, kPieceBytes * all.tiles / std::max<int64_t>(1, bytes) / std::max(1, all.m / 8));
  in_parallel(pool, (all.tiles + piece - 1) / piece, [&all, piece](int64_t i) {
    for (int64_t t = i * piece; t < std::min(all.tiles, (i + 1) * piece); ++t) all.one(t);
  });
  return ffi::Error::Success();
}

// Sums of neighbours, of a and then of b: four rounds make one vector of the sums of sixteen.
inline Floats pairs(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// e^x for x <= 0: 2^whole * e^rest, the latter as a polynomial that is right to float's rounding.
inline Floats exponential(Floats x) {
  constexpr float kRound = 12582912.0f;
  x = x < -87.0f ? Floats{} - 87.0f : x;
  Floats shifted = x * 1.44269504f + kRound, whole = shifted - kRound;
  Floats rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  Floats sum = rest * (1.0f / 5040) + 1.0f / 720;
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * rest + factor;
  return bits<Floats>(bits<Ints>(sum) + ((bits<Ints>(shifted) - 0x4B400000) << 23));
}

// Attention of one query a row to the first starts + 1 keys: one key/value head and the `group` query heads it serves.
struct Attention {
  const float *q, *keys, *values;
  const int32_t* starts;
  float* out;
  int64_t kv_heads, group, length, width, value_width;
  float scale;

  void one(int64_t i) const {
    int64_t row = i / kv_heads, n = std::min<int64_t>(starts[row] + 1, length), padded = (n + kTile - 1) / kTile * kTile;
    static thread_local std::vector<float> scores;
    scores.resize(group * padded);
    const float *own_q = q + i * group * width, *own_keys = keys + i * length * width;
    for (int64_t g = 0; g < group; ++g)
      for (int64_t s = 0; s < n; s += kTile) score(own_q + g * width, own_keys, s, &scores[g * padded + s]);
    for (int64_t g = 0; g < group; ++g) {
      float total = weigh(&scores[g * padded], n, padded);
      mix(&scores[g * padded], n, values + i * length * value_width, 1.0f / total, out + (i * group + g) * value_width);
    }
  }

  // Those of one query with the 16 keys from s on, of which the last ones may not count.
  void score(const float* one_q, const float* own_keys, int64_t s, float* to) const {
    Floats sums[kTile];
    for (int i = 0; i < kTile; ++i) {
      const float* key = own_keys + std::min(s + i, length - 1) * width;
      sums[i] = Floats{};
      for (int64_t c = 0; c < width; c += kTile) sums[i] += load<Floats>(one_q + c) * load<Floats>(key + c);
    }
    for (int count = kTile / 2; count; count /= 2)
      for (int i = 0; i < count; ++i) sums[i] = pairs(sums[2 * i], sums[2 * i + 1]);
    sums[0] *= scale;
    std::memcpy(to, sums, sizeof(Floats));
  }

  // Scores become e^(score - largest); returns their sum.
  static float weigh(float* scores, int64_t n, int64_t padded) {
    for (int64_t s = n; s < padded; ++s) scores[s] = -INFINITY;
    Floats top = load<Floats>(scores), total{};
    for (int64_t s = kTile; s < padded; s += kTile) top = larger(top, load<Floats>(scores + s));
    float largest = folded(top, larger<float>);
    for (int64_t s = 0; s < padded; s += kTile) {
      Floats weight = exponential(load<Floats>(scores + s) - largest);
      for (int64_t i = std::max<int64_t>(0, n - s); i < kTile; ++i) weight[i] = 0;
      std::memcpy(scores + s, &weight, sizeof(weight));
      total += weight;
    }
    return folded(total, plus<float>);
  }

  void mix(const float* weights, int64_t n, const float* own_values, float factor, float* to) const {
    for (int64_t z = 0; z < value_width; z += kTile) {
      Floats even{}, odd{};
      for (int64_t s = 0; s < n; s += 2) {
        even += load<Floats>(own_values + s * value_width + z) * weights[s];
        if (s + 1 < n) odd += load<Floats>(own_values + (s + 1) * value_width + z) * weights[s + 1];
      }
      Floats sum = (even + odd) * factor;
      std::memcpy(to + z, &sum, sizeof(sum));
    }
  }
};

ffi::Error attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> keys,
                  ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> starts, ffi::ResultBuffer<ffi::F32> out,
                  float scale) {
  auto of_q = q.dimensions(), of_keys = keys.dimensions(), of_values = values.dimensions();
  if (of_q.size() != 3 || of_keys.size() != 4 || of_values.size() != 4 || of_q[1] % of_keys[1] ||
      of_q[2] % kTile || of_values[3] % kTile)
    return ffi::Error::InvalidArgument("q is [b, h, c], keys [b, k, s, c], values [b, k, s, z], c and z multiples of 16");
  Attention all{q.typed_data(), keys.typed_data(), values.typed_data(), starts.typed_data(), out->typed_data(),
                of_keys[1], of_q[1] / of_keys[1], of_keys[2], of_q[2], of_values[3], scale};
  in_parallel(pool, of_q[0] * of_keys[1], [&all](int64_t i) { all.one(i); });
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(rzoo_attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale"));

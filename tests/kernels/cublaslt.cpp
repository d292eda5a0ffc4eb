// A stand-in for libcublasLt.so that computes on the CPU, for machines without a GPU. Device pointers are host
// pointers, and a product is complete when the call returns; streams and workspaces are ignored.
//
// It contains the functions that the engine calls. Combinations that the library's documentation excludes are refused
// here as well, so that a call that fails on a GPU does not pass. Everything else that is missing returns
// NOT_SUPPORTED.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <vector>

// Functions of libcuda.so: one returns whether all of this is device memory that was written, one marks it as written.
extern "C" bool emulator_device_reads(const void* p, size_t bytes);
extern "C" bool emulator_device_writes(void* p, size_t bytes);

namespace {

// Names and values below are those of the library's headers.
enum Status : int32_t {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    ALLOC_FAILED = 3,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    NOT_SUPPORTED = 15,
};
constexpr int32_t R_32F = 0, R_16BF = 14, R_8F_E4M3 = 28, R_8F_E5M2 = 29;
constexpr int32_t COMPUTE_32F = 68, COMPUTE_32F_PEDANTIC = 69, FAST_16BF = 75, FAST_TF32 = 77;
constexpr int32_t OP_N = 0, OP_T = 1;
constexpr uint32_t EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4, EPILOGUE_GELU_AUX_BIAS = 164;
constexpr uint32_t EPILOGUE_DGELU = 192, EPILOGUE_DGELU_BGRAD = 208;
constexpr int32_t DESC_TRANSA = 3, DESC_TRANSB = 4, DESC_EPILOGUE = 7, DESC_BIAS_POINTER = 8;
constexpr int32_t DESC_EPILOGUE_AUX_POINTER = 11, DESC_EPILOGUE_AUX_LD = 12;
constexpr int32_t DESC_A_SCALE_POINTER = 17, DESC_B_SCALE_POINTER = 18, DESC_FAST_ACCUM = 25;
constexpr int32_t LAYOUT_BATCH_COUNT = 5, LAYOUT_STRIDED_BATCH_OFFSET = 6;
constexpr int32_t PREF_MAX_WORKSPACE_BYTES = 1, PREF_MIN_ALIGNMENT_A_BYTES = 5, PREF_MIN_ALIGNMENT_D_BYTES = 8;

// The bits that epilogues consist of. Derivatives have AUX too.
constexpr uint32_t BIAS = 4, BIAS_GRAD = 16, GELU = 32, GELU_GRAD = 64, AUX = 128;

struct Handle {};

struct MatmulDesc {
    int32_t compute, scale, transpose_a = OP_N, transpose_b = OP_N;
    uint32_t epilogue = EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_ld = 0;
    // Factors of FP8 operands, in device memory.
    const float *a_scale = nullptr, *b_scale = nullptr;
};

struct MatrixLayout {
    int32_t type;
    uint64_t rows, cols;
    int64_t ld;
    int32_t batch = 1;
    // Elements from one matrix of a batch to the next one.
    int64_t batch_offset = 0;
};

// Alignments of A, B, C and D, with the library's default.
struct Preference {
    uint32_t alignment[4] = {256, 256, 256, 256};
};

// Opaque to callers. Also contains the alignments for which it was selected.
struct Algo {
    uint64_t mark;
    uint32_t alignment[4];
    uint64_t reserved[5];
};
static_assert(sizeof(Algo) == 64, "as cublasLtMatmulAlgo_t");
constexpr uint64_t ALGO_MARK = 0x63707520676d6d31;

struct HeuristicResult {
    Algo algo;
    size_t workspace_size;
    Status state;
    float waves_count;
    int32_t reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96, "as cublasLtMatmulHeuristicResult_t");

template <typename To, typename From>
To bit_cast(From x) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

// Rounds to nearest even so that the lowest `dropped` bits are zero. NaN stays NaN.
float round_bits(float x, int dropped) {
    if (std::isnan(x)) return x;
    uint32_t bits = bit_cast<uint32_t>(x), last = bits >> dropped & 1;
    bits += (1u << (dropped - 1)) - 1 + last;
    return bit_cast<float>(bits >> dropped << dropped);
}

uint16_t to_bf16(float x) {
    return std::isnan(x) ? 0x7fff : uint16_t(bit_cast<uint32_t>(round_bits(x, 16)) >> 16);
}

bool is_fp8(int32_t type) { return type == R_8F_E4M3 || type == R_8F_E5M2; }

float from_fp8(uint8_t code, int32_t type) {
    int mantissa_bits = type == R_8F_E5M2 ? 2 : 3, bias = type == R_8F_E5M2 ? 15 : 7;
    int magnitude = code & 0x7f, exponent = magnitude >> mantissa_bits;
    double x = magnitude & ((1 << mantissa_bits) - 1);
    if (type == R_8F_E5M2 ? exponent == 31 : magnitude == 0x7f)
        x = type == R_8F_E5M2 && x == 0 ? INFINITY : NAN;
    else
        x = exponent == 0 ? std::ldexp(x, 1 - bias - mantissa_bits)
                          : std::ldexp(x + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    return float(code & 0x80 ? -x : x);
}

// Elements of one type.
struct Elements {
    char* p;
    int32_t type;

    Elements(const void* p, int32_t type) : p(const_cast<char*>(static_cast<const char*>(p))), type(type) {}

    float load(size_t i) const {
        if (type == R_32F) return reinterpret_cast<const float*>(p)[i];
        if (is_fp8(type)) return from_fp8(uint8_t(p[i]), type);
        return bit_cast<float>(uint32_t(reinterpret_cast<const uint16_t*>(p)[i]) << 16);
    }
    // Results are never FP8.
    void store(size_t i, double x) const {
        if (type == R_16BF) reinterpret_cast<uint16_t*>(p)[i] = to_bf16(float(x));
        else reinterpret_cast<float*>(p)[i] = float(x);
    }
};

uint64_t element_size(int32_t type) { return is_fp8(type) ? 1 : type == R_16BF ? 2 : 4; }
bool is_aligned(const void* p, uint64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// A factor whose element (i, l) is at i * along_i + l * along_k, where l counts along the sum.
struct Factor {
    Elements x;
    size_t along_i, along_k;
    int dropped;  // low bits, by the compute type

    Factor(Elements x, size_t ld, bool transpose, int dropped)
        : x(x), along_i(transpose ? ld : 1), along_k(transpose ? 1 : ld), dropped(dropped) {}

    double load(size_t i, size_t l) const {
        float value = x.load(i * along_i + l * along_k);
        return dropped > 0 ? round_bits(value, dropped) : value;
    }
};

// The products of TILE x TILE elements are computed together, from factors that were converted for a block of columns.
constexpr size_t TILE = 4;
constexpr size_t BLOCK_COLS = 256;

// Packs TILE rows of a factor from i on, as k groups of TILE; rows past `rows` are zero.
void pack(const Factor& factor, size_t i, size_t rows, size_t k, double* out) {
    for (size_t r = 0; r < TILE; r++)
        for (size_t l = 0; l < k; l++) out[l * TILE + r] = i + r < rows ? factor.load(i + r, l) : 0.0;
}

// sums[c][r] = sum over l of a(r, l) b(c, l), from packed factors. Products of two floats are exact in double.
void multiply(const double* a, const double* b, size_t k, double (&sums)[TILE][TILE]) {
    double s[TILE][TILE] = {};
    for (size_t l = 0; l < k; l++, a += TILE, b += TILE)
        for (size_t c = 0; c < TILE; c++)
            for (size_t r = 0; r < TILE; r++) s[c][r] += a[r] * b[c];
    memcpy(sums, s, sizeof s);
}

// The tanh approximation of GELU: x (1 + tanh(u)) / 2 with u = SCALE (x + CUBE x^3).
constexpr double GELU_SCALE = 0.79788456080286535588, GELU_CUBE = 0.044715;

double gelu_tanh(double x) { return std::tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x)); }
double gelu(double x) { return 0.5 * x * (1.0 + gelu_tanh(x)); }
double gelu_slope(double x) {
    double t = gelu_tanh(x);
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
}

// A validated call: d (m, n) = epilogue(alpha a b + beta c), column-major.
struct Product {
    size_t m, n, k;
    Factor a, b;
    Elements c, d, bias, aux;
    size_t ldc, ldd, ld_aux;
    double alpha, beta;
    uint32_t epilogue;

    // Writes element (i, j) and returns it unrounded.
    double finish(size_t i, size_t j, double sum) const {
        double x = alpha * sum;
        // c may be uninitialised if beta is zero.
        if (beta != 0.0) x += beta * c.load(i + j * ldc);
        if (epilogue & BIAS) x += bias.load(i);
        if (epilogue & GELU) {
            aux.store(i + j * ld_aux, x);
            x = gelu(x);
        }
        if (epilogue & GELU_GRAD) x *= gelu_slope(aux.load(i + j * ld_aux));
        d.store(i + j * ldd, x);
        return x;
    }

    void run() const {
        size_t panel = k * TILE, block = std::min((n + TILE - 1) / TILE, BLOCK_COLS / TILE);
        std::vector<double> packed_a(panel), packed_b(panel * block);
        std::vector<double> row_sums(epilogue & BIAS_GRAD ? m : 0);
        for (size_t first = 0; first < n; first += BLOCK_COLS) {
            size_t end = std::min(first + BLOCK_COLS, n);
            for (size_t j = first; j < end; j += TILE) pack(b, j, n, k, &packed_b[(j - first) / TILE * panel]);
            for (size_t i = 0; i < m; i += TILE) {
                pack(a, i, m, k, packed_a.data());
                for (size_t j = first; j < end; j += TILE) {
                    double sums[TILE][TILE];
                    multiply(packed_a.data(), &packed_b[(j - first) / TILE * panel], k, sums);
                    for (size_t col = 0; col < TILE && j + col < n; col++)
                        for (size_t row = 0; row < TILE && i + row < m; row++) {
                            double x = finish(i + row, j + col, sums[col][row]);
                            if (epilogue & BIAS_GRAD) row_sums[i + row] += x;
                        }
                }
            }
        }
        for (size_t i = 0; i < row_sums.size(); i++) bias.store(i, row_sums[i]);
    }
};

// Rules that the library documents for FP8 on compute capability 8.9 and 9.0: sums run along the columns of both
// operands in memory; the columns are multiples of 16 bytes apart, like those of the result; not both operands are
// E5M2; there is no epilogue other than a bias.
Status check_fp8(const MatmulDesc& desc, const MatrixLayout& a, const MatrixLayout& b, const MatrixLayout& d, uint64_t m,
                 uint64_t n, uint64_t k) {
    bool is_valid = is_fp8(a.type) && is_fp8(b.type) && !(a.type == R_8F_E5M2 && b.type == R_8F_E5M2) &&
                    desc.transpose_a == OP_T && desc.transpose_b == OP_N && desc.compute == COMPUTE_32F &&
                    (desc.epilogue == EPILOGUE_DEFAULT || (desc.epilogue == EPILOGUE_BIAS && d.type == R_16BF));
    for (uint64_t size : {m, n, k, uint64_t(a.ld), uint64_t(b.ld), uint64_t(d.ld)}) is_valid &= size % 16 == 0;
    return is_valid ? SUCCESS : NOT_SUPPORTED;
}

// Checks everything that does not depend on the operands' addresses.
Status check(const MatmulDesc& desc, const MatrixLayout& a, const MatrixLayout& b, const MatrixLayout& c,
             const MatrixLayout& d) {
    for (const MatrixLayout* x : {&a, &b, &c, &d})
        if (x->rows == 0 || x->cols == 0 || x->ld < 0 || uint64_t(x->ld) < x->rows || x->batch < 1) return INVALID_VALUE;
    if (a.batch != d.batch || b.batch != d.batch || c.batch != d.batch) return INVALID_VALUE;
    // Matrices that are written do not overlap.
    if (d.batch > 1 && d.batch_offset < int64_t(d.ld * (d.cols - 1) + d.rows)) return INVALID_VALUE;
    bool ta = desc.transpose_a == OP_T, tb = desc.transpose_b == OP_T;
    uint64_t m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols, n = tb ? b.rows : b.cols;
    if (k != (tb ? b.cols : b.rows)) return INVALID_VALUE;
    if (c.rows != m || c.cols != n || d.rows != m || d.cols != n) return INVALID_VALUE;

    if (c.type != d.type || desc.scale != R_32F) return NOT_SUPPORTED;
    if (is_fp8(a.type) || is_fp8(b.type)) return check_fp8(desc, a, b, d, m, n, k);
    if (a.type != b.type) return NOT_SUPPORTED;
    bool from_f32 = a.type == R_32F && d.type == R_32F;
    bool from_bf16 = a.type == R_16BF && (d.type == R_16BF || d.type == R_32F);
    bool plain = desc.compute == COMPUTE_32F || desc.compute == COMPUTE_32F_PEDANTIC;
    // The fast types are documented for float only.
    bool fast = desc.compute == FAST_TF32 || desc.compute == FAST_16BF;
    if (!(plain && (from_f32 || from_bf16)) && !(fast && from_f32)) return NOT_SUPPORTED;

    // A bias and the matrix for GELU have the output's type. Their addresses may be set later.
    uint64_t size = element_size(d.type);
    if ((desc.epilogue & (BIAS | BIAS_GRAD)) && !is_aligned(desc.bias, size)) return INVALID_VALUE;
    // Batches are supported without operands of an epilogue.
    if (d.batch > 1 && desc.epilogue != EPILOGUE_DEFAULT) return NOT_SUPPORTED;
    if (desc.epilogue & AUX) {
        if (desc.aux_ld < 0 || uint64_t(desc.aux_ld) < m || !is_aligned(desc.aux, size)) return INVALID_VALUE;
        // The library documents this for GELU.
        if (desc.aux_ld % 8 != 0) return NOT_SUPPORTED;
    }
    return SUCCESS;
}

template <typename T>
Status read(const void* from, size_t size, T& to) {
    if (!from || size != sizeof(T)) return INVALID_VALUE;
    memcpy(&to, from, sizeof(T));
    return SUCCESS;
}

// Reads an attribute of which only a few values are supported.
template <typename T>
Status read_one_of(const void* from, size_t size, T& to, std::initializer_list<T> values) {
    T value;
    if (Status status = read(from, size, value)) return status;
    if (std::find(values.begin(), values.end(), value) == values.end()) return NOT_SUPPORTED;
    to = value;
    return SUCCESS;
}

template <typename T>
Status create(T** to, T value) {
    if (!to) return INVALID_VALUE;
    *to = new (std::nothrow) T(value);
    return *to ? SUCCESS : ALLOC_FAILED;
}

template <typename T>
Status destroy(T* object) {
    if (!object) return INVALID_VALUE;
    delete object;
    return SUCCESS;
}

// One multiplication of a batch.
Status multiply_one(const MatmulDesc* desc, const void* alpha, const void* a, const MatrixLayout* a_layout,
                    const void* b, const MatrixLayout* b_layout, const void* beta, const void* c,
                    const MatrixLayout* c_layout, void* d, const MatrixLayout* d_layout, const Algo* algo) {
    if (!desc || !alpha || !beta) return INVALID_VALUE;
    if (Status status = check(*desc, *a_layout, *b_layout, *c_layout, *d_layout)) return status;
    float scale_ab, scale_c;
    memcpy(&scale_ab, alpha, sizeof scale_ab);
    memcpy(&scale_c, beta, sizeof scale_c);

    const void* operands[4] = {a, b, c, d};
    int32_t types[4] = {a_layout->type, b_layout->type, c_layout->type, d_layout->type};
    if (algo && algo->mark != ALGO_MARK) return NOT_SUPPORTED;
    for (int i = 0; i < 4; i++) {
        if (!operands[i] || !is_aligned(operands[i], element_size(types[i]))) return INVALID_VALUE;
        // On a GPU, an algorithm for aligned operands faults on unaligned ones.
        if (algo && (algo->alignment[i] == 0 || !is_aligned(operands[i], algo->alignment[i]))) return INVALID_VALUE;
    }
    bool needs_bias = desc->epilogue & (BIAS | BIAS_GRAD), needs_aux = desc->epilogue & AUX;
    if ((needs_bias && !desc->bias) || (needs_aux && !desc->aux)) return INVALID_VALUE;
    // In place, both layouts must be the same.
    if (c == d && c_layout->ld != d_layout->ld) return INVALID_VALUE;

    bool ta = desc->transpose_a == OP_T, tb = desc->transpose_b == OP_T;
    int dropped = desc->compute == FAST_TF32 ? 13 : desc->compute == FAST_16BF ? 16 : 0;
    Factor rows_of_a(Elements(a, types[0]), size_t(a_layout->ld), ta, dropped);
    Factor cols_of_b(Elements(b, types[1]), size_t(b_layout->ld), !tb, dropped);
    Elements bias(desc->bias, types[3]), aux(desc->aux, types[3]);
    Product product = {
        d_layout->rows, d_layout->cols, ta ? a_layout->rows : a_layout->cols,
        rows_of_a, cols_of_b, Elements(c, types[2]), Elements(d, types[3]), bias, aux,
        size_t(c_layout->ld), size_t(d_layout->ld), size_t(desc->aux_ld),
        scale_ab, scale_c, desc->epilogue,
    };
    // The leading dimension is the distance between the columns of an operand.
    auto all = [](auto access, auto* p, uint64_t rows, uint64_t cols, int64_t ld, int32_t type) {
        size_t size = element_size(type);
        bool is_ok = true;
        for (uint64_t i = 0; i < cols; i++) is_ok = is_ok && access((char*)p + i * ld * size, rows * size);
        return is_ok;
    };
    auto reads = [&](const void* p, const MatrixLayout& l) {
        return all(emulator_device_reads, p, l.rows, l.cols, l.ld, l.type);
    };
    uint64_t rows = d_layout->rows, cols = d_layout->cols;
    bool is_read = reads(a, *a_layout) && reads(b, *b_layout) && (scale_c == 0.0f || reads(c, *c_layout));
    if (desc->epilogue & BIAS) is_read = is_read && all(emulator_device_reads, desc->bias, rows, 1, 0, types[3]);
    if (desc->epilogue & GELU_GRAD)
        is_read = is_read && all(emulator_device_reads, desc->aux, rows, cols, desc->aux_ld, types[3]);
    if (desc->epilogue & GELU)
        is_read = is_read && all(emulator_device_writes, desc->aux, rows, cols, desc->aux_ld, types[3]);
    if (desc->epilogue & BIAS_GRAD) is_read = is_read && all(emulator_device_writes, desc->bias, rows, 1, 0, types[3]);
    if (!is_read || !all(emulator_device_writes, d, rows, cols, d_layout->ld, types[3])) return EXECUTION_FAILED;

    for (const float* factor : {desc->a_scale, desc->b_scale}) {
        if (!factor) continue;
        if (!is_fp8(types[0]) || !is_aligned(factor, 16) || !emulator_device_reads(factor, sizeof *factor))
            return EXECUTION_FAILED;
        product.alpha *= *factor;
    }

    // An exception must not leave the library.
    try {
        product.run();
    } catch (const std::exception&) {
        return ALLOC_FAILED;
    }
    return SUCCESS;
}

}  // namespace

extern "C" {

// Version of the bindings that the engine is built with: 13.0.
size_t cublasLtGetVersion() { return 130000; }

Status cublasLtCreate(Handle** handle) { return create(handle, Handle{}); }
Status cublasLtDestroy(Handle* handle) { return destroy(handle); }

Status cublasLtMatmulDescCreate(MatmulDesc** desc, int32_t compute, int32_t scale) {
    return create(desc, MatmulDesc{compute, scale});
}
Status cublasLtMatmulDescDestroy(MatmulDesc* desc) { return destroy(desc); }

Status cublasLtMatmulDescSetAttribute(MatmulDesc* desc, int32_t attribute, const void* value, size_t size) {
    if (!desc) return INVALID_VALUE;
    switch (attribute) {
    case DESC_TRANSA: return read_one_of(value, size, desc->transpose_a, {OP_N, OP_T});
    case DESC_TRANSB: return read_one_of(value, size, desc->transpose_b, {OP_N, OP_T});
    case DESC_BIAS_POINTER: return read(value, size, desc->bias);
    case DESC_EPILOGUE_AUX_POINTER: return read(value, size, desc->aux);
    case DESC_EPILOGUE_AUX_LD: return read(value, size, desc->aux_ld);
    case DESC_A_SCALE_POINTER: return read(value, size, desc->a_scale);
    case DESC_B_SCALE_POINTER: return read(value, size, desc->b_scale);
    case DESC_FAST_ACCUM: {
        // Sums are exact here.
        int8_t fast;
        return read_one_of(value, size, fast, {int8_t(0), int8_t(1)});
    }
    case DESC_EPILOGUE:
        return read_one_of(value, size, desc->epilogue,
                           {EPILOGUE_DEFAULT, EPILOGUE_BIAS, EPILOGUE_GELU_AUX_BIAS, EPILOGUE_DGELU,
                            EPILOGUE_DGELU_BGRAD});
    default: return NOT_SUPPORTED;
    }
}

Status cublasLtMatrixLayoutCreate(MatrixLayout** layout, int32_t type, uint64_t rows, uint64_t cols, int64_t ld) {
    return create(layout, MatrixLayout{type, rows, cols, ld});
}
Status cublasLtMatrixLayoutDestroy(MatrixLayout* layout) { return destroy(layout); }

Status cublasLtMatrixLayoutSetAttribute(MatrixLayout* layout, int32_t attribute, const void* value, size_t size) {
    if (!layout) return INVALID_VALUE;
    switch (attribute) {
    case LAYOUT_BATCH_COUNT: return read(value, size, layout->batch);
    case LAYOUT_STRIDED_BATCH_OFFSET: return read(value, size, layout->batch_offset);
    // The engine specifies everything else when it creates a layout.
    default: return NOT_SUPPORTED;
    }
}

Status cublasLtMatmulPreferenceCreate(Preference** preference) { return create(preference, Preference{}); }
Status cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference); }

Status cublasLtMatmulPreferenceSetAttribute(Preference* preference, int32_t attribute, const void* value,
                                            size_t size) {
    if (!preference) return INVALID_VALUE;
    uint64_t workspace;
    if (attribute == PREF_MAX_WORKSPACE_BYTES) return read(value, size, workspace);
    if (attribute < PREF_MIN_ALIGNMENT_A_BYTES || attribute > PREF_MIN_ALIGNMENT_D_BYTES) return NOT_SUPPORTED;
    uint32_t bytes;
    if (Status status = read(value, size, bytes)) return status;
    if (bytes == 0 || (bytes & (bytes - 1)) != 0) return INVALID_VALUE;
    preference->alignment[attribute - PREF_MIN_ALIGNMENT_A_BYTES] = bytes;
    return SUCCESS;
}

Status cublasLtMatmulAlgoGetHeuristic(Handle* handle, const MatmulDesc* desc, const MatrixLayout* a,
                                      const MatrixLayout* b, const MatrixLayout* c, const MatrixLayout* d,
                                      const Preference* preference, int requested, HeuristicResult* results,
                                      int* count) {
    if (count) *count = 0;
    if (!handle) return NOT_INITIALIZED;
    if (!desc || !a || !b || !c || !d || !preference || requested < 1 || !results || !count) return INVALID_VALUE;
    if (Status status = check(*desc, *a, *b, *c, *d)) return status;
    *results = {};
    results->algo.mark = ALGO_MARK;
    memcpy(results->algo.alignment, preference->alignment, sizeof preference->alignment);
    results->state = SUCCESS;
    *count = 1;
    return SUCCESS;
}

Status cublasLtMatmul(Handle* handle, const MatmulDesc* desc, const void* alpha, const void* a,
                      const MatrixLayout* a_layout, const void* b, const MatrixLayout* b_layout, const void* beta,
                      const void* c, const MatrixLayout* c_layout, void* d, const MatrixLayout* d_layout,
                      const Algo* algo, void* /* workspace */, size_t /* workspace_size */, void* /* stream */) {
    if (!handle) return NOT_INITIALIZED;
    if (!a_layout || !b_layout || !c_layout || !d_layout) return INVALID_VALUE;
    auto at = [](const void* p, const MatrixLayout& layout, int i) {
        size_t bytes = i * size_t(layout.batch_offset) * element_size(layout.type);
        return p ? static_cast<const char*>(p) + bytes : nullptr;
    };
    for (int i = 0; i < d_layout->batch; i++) {
        Status status = multiply_one(desc, alpha, at(a, *a_layout, i), a_layout, at(b, *b_layout, i), b_layout, beta,
                                     at(c, *c_layout, i), c_layout, const_cast<char*>(at(d, *d_layout, i)), d_layout,
                                     algo);
        if (status) return status;
    }
    return SUCCESS;
}

}  // extern "C"

// Goal: without a GPU, that attention.cu computes attention and its gradients: fragment layouts,
// addresses, masks, stages and barriers, for packed sequences, windows and grouped queries.
//
// Method: the kernels' own source is compiled for the CPU. Each function of
// attention_primitives.cuh is written again here by its definition in the PTX ISA; CUDA threads are
// fibres that meet at warp-wide instructions and barriers. An asynchronous copy poisons its target
// when it starts and writes it when it is waited for, so that reading too early or overwriting too
// soon shows. Results are compared with sums in double precision over the same bf16 inputs.
//
// c++ -std=c++20 -O2 -o attention_emulated tests/kernels/attention_emulated.cpp &&
// ./attention_emulated
#include "emulated.hpp"

#include "../../kernels/attention.cu"
#include "../../kernels/attention_plain.cu"

// ---- The reference
// ----------------------------------------------------------------------------------

struct Shape {
    int heads, kv_heads, dim, window;
    std::vector<u32> bounds;
};
struct Tensors {
    std::vector<float> q, k, v, dout, o, lse, dq, dk, dv;
};

static Tensors reference(const Shape& shape, const Tensors& in)
{
    const int heads = shape.heads, kv = shape.kv_heads, dim = shape.dim,
              tokens = shape.bounds.back();
    const double scale = 1 / std::sqrt((double)dim);
    std::vector<double> dk(in.k.size()), dv(in.k.size());
    Tensors out = in;
    out.o.assign(in.q.size(), 0);
    out.dq.assign(in.q.size(), 0);
    out.lse.assign(heads * tokens, 0);
    for (size_t s = 0; s + 1 < shape.bounds.size(); ++s)
        for (int token = shape.bounds[s]; token < (int)shape.bounds[s + 1]; ++token)
            for (int head = 0; head < heads; ++head) {
                const size_t row = ((size_t)token * heads + head) * dim;
                const int from = std::max<int>(shape.bounds[s], token + 1 - shape.window);
                std::vector<double> p, o(dim), dq(dim);
                double sum = 0, delta = 0;
                for (int j = from; j <= token; ++j) {
                    const size_t at = ((size_t)j * kv + head / (heads / kv)) * dim;
                    double x = 0;
                    for (int d = 0; d < dim; ++d) x += (double)in.q[row + d] * in.k[at + d];
                    p.push_back(std::exp(x * scale));
                    sum += p.back();
                }
                for (int j = from; j <= token; ++j) {
                    const size_t at = ((size_t)j * kv + head / (heads / kv)) * dim;
                    p[j - from] /= sum;
                    for (int d = 0; d < dim; ++d) o[d] += p[j - from] * in.v[at + d];
                }
                for (int d = 0; d < dim; ++d) delta += o[d] * in.dout[row + d];
                for (int j = from; j <= token; ++j) {
                    const size_t at = ((size_t)j * kv + head / (heads / kv)) * dim;
                    double dp = 0;
                    for (int d = 0; d < dim; ++d) dp += (double)in.dout[row + d] * in.v[at + d];
                    const double ds = p[j - from] * (dp - delta) * scale;
                    for (int d = 0; d < dim; ++d) {
                        dq[d] += ds * in.k[at + d];
                        dk[at + d] += ds * in.q[row + d];
                        dv[at + d] += p[j - from] * in.dout[row + d];
                    }
                }
                for (int d = 0; d < dim; ++d) out.o[row + d] = o[d], out.dq[row + d] = dq[d];
                out.lse[(size_t)head * tokens + token] = std::log(sum);
            }
    out.dk.assign(dk.begin(), dk.end());
    out.dv.assign(dv.begin(), dv.end());
    return out;
}

// ---- The kernels
// --------------------------------------------------------------------------------------

static std::vector<u32> units_of(const Shape& shape, int rows)
{
    std::vector<u32> units;
    for (size_t s = 0; s + 1 < shape.bounds.size(); ++s)
        for (u32 first = 0; first < shape.bounds[s + 1] - shape.bounds[s]; first += rows)
            units.insert(units.end(),
                         {shape.bounds[s], shape.bounds[s + 1] - shape.bounds[s], first, 0});
    return units;
}

template <class T>
static std::vector<T> to(const std::vector<float>& x);
template <>
std::vector<float> to(const std::vector<float>& x)
{
    return x;
}
template <>
std::vector<u16> to(const std::vector<float>& x)
{
    std::vector<u16> y;
    for (float f : x) y.push_back(float_to_bf16(f));
    return y;
}
static std::vector<float> from(const std::vector<float>& x)
{
    return x;
}
static std::vector<float> from(const std::vector<u16>& x)
{
    std::vector<float> y;
    for (u16 f : x) y.push_back(bf16_to_float(f));
    return y;
}

// The outputs of a kernel set; `Kernels` has forward, queries and keys over pointers of type T.
template <class T, class Kernels>
static Tensors run(const Shape& shape, const Tensors& in, Kernels kernels)
{
    const int tokens = shape.bounds.back();
    const float scale = 1 / std::sqrt((float)shape.dim);
    const Problem p = {(u64)tokens, shape.heads, shape.kv_heads, std::min(shape.window, tokens),
                       scale};
    auto q = to<T>(in.q), k = to<T>(in.k), v = to<T>(in.v), dout = to<T>(in.dout);
    std::vector<T> o(q.size()), dq(q.size()), dk(k.size()), dv(k.size());
    std::vector<float> lse(shape.heads * tokens), delta(lse.size());
    kernels.forward(shape, p, q.data(), k.data(), v.data(), o.data(), lse.data());
    launch((tokens + 3) / 4, shape.heads, 1, 128, 0,
           [&] { row_delta<T>(o.data(), dout.data(), delta.data(), shape.dim, p); });
    kernels.queries(shape, p, q.data(), k.data(), v.data(), dout.data(), lse.data(), delta.data(),
                    dq.data());
    kernels.keys(shape, p, q.data(), k.data(), v.data(), dout.data(), lse.data(), delta.data(),
                 dk.data(), dv.data());
    Tensors out = in;
    out.o = from(o), out.lse = lse, out.dq = from(dq), out.dk = from(dk), out.dv = from(dv);
    return out;
}

template <int D, int WARPS, int KEYS, int QUERIES, int SLICE>
struct Tensor {
    void forward(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* o, float* lse)
    {
        auto units = units_of(shape, WARPS * 16);
        const u32 row = D * 2 + 16, stages = 4 * WARPS * 8 * row;
        launch(units.size() / 4, shape.heads, 1, WARPS * 32,
               stages + (D > 128 ? WARPS * 16 * row : 0),
               [&] { ::forward<D, WARPS>(q, k, v, o, lse, units.data(), p); });
    }
    void queries(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* dout, float* lse,
                 float* delta, u16* dq)
    {
        auto units = units_of(shape, 64);
        launch(units.size() / 4, shape.heads, 1, 128, (2 * 64 + 4 * KEYS) * (D * 2 + 16), [&] {
            backward_queries<D, 4, KEYS>(q, k, v, dout, lse, delta, dq, units.data(), p);
        });
    }
    void keys(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* dout, float* lse,
              float* delta, u16* dk, u16* dv)
    {
        auto units = units_of(shape, 64);
        launch(units.size() / 4, shape.kv_heads, D / SLICE, 128,
               (2 * 64 + 4 * QUERIES) * (D * 2 + 16) + 16 * QUERIES, [&] {
                   backward_keys<D, 4, QUERIES, SLICE>(q, k, v, dout, lse, delta, dk, dv,
                                                       units.data(), p);
               });
    }
};

// Two sections of heads where there are two or more; two blocks.
template <int D, class Forward, class Queries, class Keys>
struct Wgmma {
    template <class Kernel>
    static void run(const Shape& shape, int heads, u32 shared,
                    Kernel kernel)
    {
        auto list = units_of(shape, UNIT_ROWS);
        const u32 units = list.size() / 4;
        list.insert(list.begin(), {0, float_to_bits(INFINITE), 0, 0});
        const Work work = {list.data(), units, (u32)heads, (u32)(heads + 1) / 2};
        launch(2, 1, 1, WGMMA_THREADS, shared, [&] { kernel(work); });
    }
    static TensorMap map(const u16* matrix, int heads, int rows, const Problem& p)
    {
        return TensorMap{matrix, D, heads, (int)p.tokens, rows};
    }
    void forward(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* o, float* lse)
    {
        const int keys = Forward::N * 8;
        const TensorMap qs = map(q, p.heads, UNIT_ROWS, p), ks = map(k, p.kv_heads, keys, p),
                        vs = map(v, p.kv_heads, keys, p);
        run(shape, p.heads, Forward::BYTES,
            [&](const Work& work) { Forward::run(qs, ks, vs, o, lse, work, p); });
    }
    void queries(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* dout, float* lse,
                 float* delta, u16* dq)
    {
        const int keys = Queries::N * 8;
        const TensorMap qs = map(q, p.heads, UNIT_ROWS, p), ks = map(k, p.kv_heads, keys, p),
                        vs = map(v, p.kv_heads, keys, p), dos = map(dout, p.heads, UNIT_ROWS, p);
        run(shape, p.heads, Queries::BYTES, [&](const Work& work) {
            Queries::run(qs, ks, vs, dos, lse, delta, dq, work, p);
        });
    }
    void keys(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* dout, float* lse,
              float* delta, u16* dk, u16* dv)
    {
        const int queries = Keys::N * 8;
        const TensorMap qs = map(q, p.heads, queries, p), ks = map(k, p.kv_heads, UNIT_ROWS, p),
                        vs = map(v, p.kv_heads, UNIT_ROWS, p), dos = map(dout, p.heads, queries, p);
        run(shape, p.kv_heads, Keys::BYTES, [&](const Work& work) {
            Keys::run(qs, ks, vs, dos, lse, delta, dk, dv, work, p);
        });
    }
};
typedef Wgmma<64, Forward64, Queries64, Keys64> Wgmma64;
typedef Wgmma<128, Forward128, Queries128, Keys128> Wgmma128;

template <class T>
struct Plain {
    void forward(const Shape& shape, Problem p, T* q, T* k, T* v, T* o, float* lse)
    {
        launch((p.tokens + 3) / 4, shape.heads, 1, 128, 0, [&] {
            plain_forward<T>(q, k, v, o, lse, shape.bounds.data(), shape.bounds.size() - 1,
                             shape.dim, p);
        });
    }
    void queries(const Shape& shape, Problem p, T* q, T* k, T* v, T* dout, float* lse, float* delta,
                 T* dq)
    {
        launch((p.tokens + 3) / 4, shape.heads, 1, 128, 0, [&] {
            plain_queries<T>(q, k, v, dout, lse, delta, dq, shape.bounds.data(),
                             shape.bounds.size() - 1, shape.dim, p);
        });
    }
    void keys(const Shape& shape, Problem p, T* q, T* k, T* v, T* dout, float* lse, float* delta,
              T* dk, T* dv)
    {
        launch((p.tokens + 3) / 4, shape.kv_heads, 1, 128, 0, [&] {
            plain_keys<T>(q, k, v, dout, lse, delta, dk, dv, shape.bounds.data(),
                          shape.bounds.size() - 1, shape.dim, p);
        });
    }
};

static int failures = 0;

// Largest difference beyond half a unit of bf16, over the root mean square (0.1 at least, for
// gradients that are zero).
static double difference(const std::vector<float>& a, const std::vector<float>& b)
{
    double top = 0, square = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        if (!(a[i] == a[i])) return std::numeric_limits<double>::infinity();
        top = std::max(top, std::fabs((double)a[i] - b[i]) - std::fabs(b[i]) / 256);
        square += (double)b[i] * b[i];
    }
    return top / std::max(0.1, std::sqrt(square / a.size()));
}

template <class T, class Kernels>
static void check(const std::string& name, Shape shape, float loud, double limit, Kernels kernels)
{
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    auto fill = [&](size_t count, float by) {
        std::vector<float> x(count);
        for (float& f : x) f = bf16_to_float(float_to_bf16(normal(random) * by));
        return x;
    };
    const size_t tokens = shape.bounds.back(), q = tokens * shape.heads * shape.dim,
                 k = tokens * shape.kv_heads * shape.dim;
    Tensors in;
    in.q = fill(q, loud), in.k = fill(k, 1), in.v = fill(k, 1), in.dout = fill(q, 1);
    const Tensors wanted = reference(shape, in), got = run<T>(shape, in, kernels);
    const double differences[] = {difference(got.o, wanted.o), difference(got.lse, wanted.lse),
                                  difference(got.dq, wanted.dq), difference(got.dk, wanted.dk),
                                  difference(got.dv, wanted.dv)};
    bool right = true;
    printf("%-12s D %3d heads %d/%d window %5d tokens %4zu:", name.c_str(), shape.dim, shape.heads,
           shape.kv_heads, shape.window, tokens);
    for (double d : differences) printf(" %.1e", d), right &= d < limit;
    printf("  %s\n", right ? "ok" : "WRONG");
    fflush(stdout);
    failures += !right;
}

int main()
{
    const int all = 1 << 30;
    const double bf16 = 0.08, f32 = 2e-5;
    printf("difference / rms of: o lse dq dk dv\n");
    check<float>("plain f32", {4, 2, 40, all, {0, 5, 6, 40}}, 1, f32, Plain<float>());
    check<float>("plain f32", {2, 1, 64, 7, {0, 33}}, 2, f32, Plain<float>());
    check<u16>("plain bf16", {2, 2, 48, all, {0, 20, 31}}, 1, bf16, Plain<u16>());
    check<u16>("mma", {2, 1, 64, all, {0, 200, 201, 233}}, 1, bf16, Tensor<64, 8, 64, 64, 64>());
    check<u16>("mma", {2, 2, 128, all, {0, 150, 300}}, 1, bf16, Tensor<128, 8, 32, 32, 128>());
    check<u16>("mma", {3, 1, 128, 70, {0, 290}}, 4, bf16, Tensor<128, 8, 32, 32, 128>());
    check<u16>("mma", {2, 1, 96, 33, {0, 7, 170}}, 1, bf16, Tensor<96, 8, 64, 32, 96>());
    check<u16>("mma", {1, 1, 80, all, {0, 140}}, 1, bf16, Tensor<80, 8, 64, 32, 80>());
    check<u16>("mma", {2, 2, 32, 1, {0, 64, 140}}, 1, bf16, Tensor<32, 8, 64, 64, 32>());
    check<u16>("mma", {2, 1, 256, 40, {0, 100, 130}}, 1, bf16, Tensor<256, 4, 16, 16, 128>());
    check<u16>("wgmma", {1, 1, 64, all, {0, 200, 201, 233}}, 1, bf16, Wgmma64());
    check<u16>("wgmma", {2, 1, 128, all, {0, 420}}, 3, bf16, Wgmma128());
    check<u16>("wgmma", {1, 1, 128, 100, {0, 128, 500}}, 1, bf16, Wgmma128());
    if (failures) printf("%d of the checks failed\n", failures);
    return failures != 0;
}

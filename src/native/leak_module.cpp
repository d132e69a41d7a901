// Python binding of the gradient-matching kernels (leak.inc).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "leak.h"

namespace nb = nanobind;
using namespace fedveil;

#define FV_DECLARE(isa)                      \
    namespace fedveil::isa {                 \
    extern const LeakKernels leak_kernels;   \
    }
FV_DECLARE(base)
#if defined(FEDVEIL_X86)
FV_DECLARE(avx2)
FV_DECLARE(avx512)
#endif

namespace {

const LeakKernels& choose(const std::string& isa) {
#if defined(FEDVEIL_X86)
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    const bool middle = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (wide && (isa == "auto" || isa == "avx512")) return avx512::leak_kernels;
    if (middle && (isa == "auto" || isa == "avx2")) return avx2::leak_kernels;
#endif
    if (isa != "auto" && isa != "base") throw std::invalid_argument("this CPU or build has no instruction set '" + isa + "'");
    return base::leak_kernels;
}

using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
constexpr int kFields = 15;

// convs [n, 15] in the order of struct Conv; dense: features, classes, weight offset, bias offset, parameters
LeakNet read_net(const Longs& convs, const Longs& dense) {
    if (convs.ndim() != 2 || convs.shape(1) != kFields || convs.shape(0) < 1 || convs.shape(0) > size_t(kMostConvs) ||
        dense.size() != 5)
        throw std::invalid_argument("the net does not fit");
    LeakNet net{};
    net.convs = int32_t(convs.shape(0));
    for (int l = 0; l < net.convs; ++l) {
        const int64_t* f = convs.data() + l * kFields;
        Conv& c = net.conv[l];
        int32_t* fields[] = {&c.c, &c.h, &c.w, &c.oc, &c.oh, &c.ow, &c.kh, &c.kw, &c.sh, &c.sw, &c.ph, &c.pw, &c.tanh};
        for (int j = 0; j < 13; ++j) *fields[j] = int32_t(f[j]);
        c.weight = f[13], c.bias = f[14];
        if (c.oc > kLanes || (l ? c.c : c.c * c.kw) > kLanes) throw std::invalid_argument("a layer is too wide");
    }
    const int64_t* d = dense.data();
    net.features = int32_t(d[0]), net.classes = int32_t(d[1]), net.dense = d[2], net.dense_bias = d[3], net.params = d[4];
    const Conv& last = net.conv[net.convs - 1];
    if (net.features != last.oc * last.oh * last.ow) throw std::invalid_argument("the dense layer does not fit");
    return net;
}

struct Space {
    explicit Space(int64_t floats)
        : data(static_cast<float*>(std::aligned_alloc(64, size_t((floats * 4 + 127) / 64 * 64))), std::free) {
        if (!data) throw std::bad_alloc();
    }
    std::unique_ptr<float, void (*)(void*)> data;
};

int64_t inputs(const LeakNet& net) { return int64_t(net.conv[0].c) * net.conv[0].h * net.conv[0].w; }

void check(bool fits) {
    if (!fits) throw std::invalid_argument("an array has the wrong shape");
}

}  // namespace

NB_MODULE(_leak, m) {
    m.attr("VERSION") = 1;
    m.def("kept", [](const Longs& convs, const Longs& dense) { return choose("auto").kept(read_net(convs, dense)); });
    m.def("gradients", [](const Longs& convs, const Longs& dense, const Floats& weights, const Floats& x, const Floats& t,
                          Out g, Out state, const std::string& isa) {
        const LeakNet net = read_net(convs, dense);
        const LeakKernels& k = choose(isa);
        const int64_t rows = int64_t(g.shape(0));
        check(int64_t(weights.size()) == net.params && int64_t(x.size()) == rows * inputs(net) &&
              int64_t(t.size()) == rows * net.classes && int64_t(g.shape(1)) == net.params &&
              int64_t(state.shape(0)) == rows && int64_t(state.shape(1)) == k.kept(net));
        nb::gil_scoped_release release;
        Space packed(k.packed_size(net)), space(k.scratch(net));
        k.pack(net, weights.data(), packed.data.get());
        for (int64_t r = 0; r < rows; ++r)
            k.gradient(net, weights.data(), packed.data.get(), x.data() + r * inputs(net), t.data() + r * net.classes,
                       g.data() + r * net.params, state.data() + r * int64_t(state.shape(1)), space.data.get());
    });
    // options: n, clip, on_example, cosine, noisy. rows: which of seen, weight and size belong to each row of x.
    m.def("match", [](const Longs& convs, const Longs& dense, const Floats& weights, const Longs& options, float bound,
                      const Longs& begin, std::optional<Floats> shift, std::optional<Floats> scale, const Floats& x,
                      const Floats& t, const Floats& seen, std::optional<Floats> weight, const Floats& size, const Longs& rows,
                      Out value, Out dx, Out dt, const std::string& isa) {
        const LeakNet net = read_net(convs, dense);
        const LeakKernels& k = choose(isa);
        check(options.size() == 5);
        const int64_t* o = options.data();
        const Match match = {int32_t(o[0]), int32_t(o[1]), int32_t(o[2]), int32_t(o[3]), int32_t(o[4]), bound,
                             int32_t(begin.size()) - 1, begin.data(), shift ? shift->data() : nullptr,
                             scale ? scale->data() : nullptr};
        const int64_t n = match.n, count = int64_t(rows.size()), all = int64_t(size.size());
        check(n >= 1 && int64_t(x.size()) == count * n * inputs(net) && int64_t(t.size()) == count * n * net.classes &&
              int64_t(seen.size()) == all * net.params && (!weight || int64_t(weight->size()) == all * net.params) &&
              int64_t(value.size()) == count && int64_t(dx.size()) == int64_t(x.size()) &&
              int64_t(dt.size()) == int64_t(t.size()) && match.segments >= 1 && begin.data()[match.segments] == net.params &&
              bool(shift) == bool(scale) && (!shift || int64_t(shift->size()) == net.params) &&
              (!scale || int64_t(scale->size()) == net.params));
        for (int64_t r = 0; r < count; ++r) check(rows.data()[r] >= 0 && rows.data()[r] < all);
        nb::gil_scoped_release release;
        Space packed(k.packed_size(net)), space(k.match_space(net, match)), state(n * k.kept(net));
        std::memset(state.data.get(), 0, size_t(n * k.kept(net)) * 4);
        k.pack(net, weights.data(), packed.data.get());
        for (int64_t r = 0; r < count; ++r) {
            const int64_t v = rows.data()[r];
            value.data()[r] = k.match(net, match, weights.data(), packed.data.get(), x.data() + r * n * inputs(net),
                                      t.data() + r * n * net.classes, seen.data() + v * net.params,
                                      weight ? weight->data() + v * net.params : nullptr, size.data()[v],
                                      dx.data() + r * n * inputs(net), dt.data() + r * n * net.classes, state.data.get(),
                                      space.data.get());
        }
    }, nb::arg("convs"), nb::arg("dense"), nb::arg("weights"), nb::arg("options"), nb::arg("bound"), nb::arg("begin"),
       nb::arg("shift").none(), nb::arg("scale").none(), nb::arg("x"), nb::arg("t"), nb::arg("seen"), nb::arg("weight").none(),
       nb::arg("size"), nb::arg("rows"), nb::arg("value"), nb::arg("dx"), nb::arg("dt"), nb::arg("isa"));
    // q[k] is replaced for every k by the direction of row rows[k]: s, y [R, M, n], rho [R, M], gamma [R], stored [R]
    m.def("two_loops", [](const Floats& s, const Floats& y, const Floats& rho, const Floats& gamma, const Longs& stored,
                          const Longs& rows, Out q, const std::string& isa) {
        const LeakKernels& k = choose(isa);
        check(s.ndim() == 3 && y.size() == s.size() && s.shape(1) < 256);
        const int64_t all = int64_t(s.shape(0)), memory = int64_t(s.shape(1)), n = int64_t(s.shape(2));
        check(int64_t(rho.size()) == all * memory && int64_t(gamma.size()) == all && int64_t(stored.size()) == all &&
              int64_t(q.shape(1)) == n && q.shape(0) == rows.size());
        nb::gil_scoped_release release;
        for (size_t i = 0; i < rows.size(); ++i) {
            const int64_t r = rows.data()[i];
            if (r < 0 || r >= all) continue;
            k.two_loop(s.data() + r * memory * n, y.data() + r * memory * n, rho.data() + r * memory, gamma.data()[r], memory,
                       stored.data()[r], n, q.data() + int64_t(i) * n);
        }
    });
    m.def("pullback", [](const Longs& convs, const Longs& dense, const Floats& weights, const Floats& state, const Floats& t,
                         const Floats& v, Out dx, Out dt, const std::string& isa) {
        const LeakNet net = read_net(convs, dense);
        const LeakKernels& k = choose(isa);
        const int64_t rows = int64_t(dx.shape(0));
        check(int64_t(weights.size()) == net.params && int64_t(dx.shape(1)) == inputs(net) &&
              int64_t(t.size()) == rows * net.classes && int64_t(v.size()) == rows * net.params &&
              int64_t(state.size()) == rows * k.kept(net) && int64_t(dt.shape(0)) == rows &&
              int64_t(dt.shape(1)) == net.classes);
        nb::gil_scoped_release release;
        Space packed(k.packed_size(net)), space(k.scratch(net));
        k.pack(net, weights.data(), packed.data.get());
        for (int64_t r = 0; r < rows; ++r)
            k.pullback(net, weights.data(), packed.data.get(), state.data() + r * k.kept(net), t.data() + r * net.classes,
                       v.data() + r * net.params, dx.data() + r * inputs(net), dt.data() + r * net.classes,
                       space.data.get());
    });
}

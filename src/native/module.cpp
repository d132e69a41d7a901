// Python binding: arrays by pointer, clients over threads, the interpreter's lock released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "engine.h"
#include "exact.h"
#include "masks.h"
#include "products.h"

namespace nb = nanobind;
using namespace fedveil;

#define FV_DECLARE(isa)                       \
    namespace fedveil::isa {                  \
    extern const Engine engine;               \
    extern const NoiseKernels noise_kernels;  \
    extern const ProductKernels product_kernels; \
    }
FV_DECLARE(base)
#if defined(FEDVEIL_X86)
FV_DECLARE(avx2)
FV_DECLARE(avx512)
#endif

namespace {

struct Choice {
    const Engine* engine;
    const NoiseKernels* noise;
    const ProductKernels* product;
};

bool supported(const std::string& isa) {
#if defined(FEDVEIL_X86)
    if (isa == "avx512")
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return isa == "base";
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> out;
    for (const char* isa : {"avx512", "avx2", "base"})
        if (supported(isa)) out.emplace_back(isa);
    return out;
}

// "auto": the widest this CPU has.
Choice choose(const std::string& isa) {
    const std::string name = isa == "auto" ? instruction_sets().front() : isa;
    if (!supported(name)) throw std::invalid_argument("this CPU or build has no instruction set '" + name + "'");
#if defined(FEDVEIL_X86)
    if (name == "avx512") return {&avx512::engine, &avx512::noise_kernels, &avx512::product_kernels};
    if (name == "avx2") return {&avx2::engine, &avx2::noise_kernels, &avx2::product_kernels};
#endif
    return {&base::engine, &base::noise_kernels, &base::product_kernels};
}

Cipher cipher_for(const std::string& isa) { return isa == "base" ? portable_cipher() : best_cipher(); }

using FloatOut = nb::ndarray<nb::numpy, float, nb::ndim<1>>;

FloatOut noise(nb::bytes key, int64_t step, int64_t count, int64_t first, int64_t example, uint32_t purpose,
               const StaircaseShape* shape, const std::string& isa) {
    if (key.size() != 16) throw std::invalid_argument("a noise key has 16 bytes");
    if (count < 0 || first < 0 || first + count >= int64_t(1) << 33)
        throw std::invalid_argument("a noise stream has no such values");
    const Choice choice = choose(isa);
    float* out = static_cast<float*>(std::malloc(size_t(count > 0 ? count : 1) * sizeof(float)));
    if (!out) throw std::bad_alloc();
    nb::capsule owner(out, [](void* p) noexcept { std::free(p); });
    AesKey schedule;
    expand_key(reinterpret_cast<const uint8_t*>(key.c_str()), schedule);
    {
        nb::gil_scoped_release release;
        fill_noise(*choice.noise, cipher_for(isa), {&schedule, uint32_t(step), uint32_t(example), purpose}, shape, first,
                   count, out);
    }
    return FloatOut(out, {size_t(count)}, owner);
}

// out[k] = factors[k] times the first values of the normal stream of key k (16 bytes each, one after the other).
void fill_normals(nb::bytes keys, int64_t step, nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> factors,
                  nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out, const std::string& isa) {
    const size_t streams = out.shape(0), count = out.shape(1);
    if (keys.size() != 16 * streams || factors.shape(0) != streams) throw std::invalid_argument("every row has a key of 16 bytes and a factor");
    const Choice choice = choose(isa);
    const Cipher cipher = cipher_for(isa);
    nb::gil_scoped_release release;
    for (size_t k = 0; k < streams; ++k) {
        AesKey schedule;
        expand_key(reinterpret_cast<const uint8_t*>(keys.c_str()) + 16 * k, schedule);
        float* row = out.data() + k * count;
        fill_noise(*choice.noise, cipher, {&schedule, uint32_t(step), 0, NORMAL}, nullptr, 0, int64_t(count), row);
        const float factor = factors.data()[k];
        for (size_t i = 0; i < count; ++i) row[i] *= factor;
    }
}

using Stack = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;

// c[m] = a[m] b[m] (+ bias): [m, rows, terms] times [m, terms, columns]; a stack of one matrix is used for all.
void products(Stack a, Stack b, nb::ndarray<float, nb::ndim<3>, nb::device::cpu> c,
              std::optional<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>> bias, const std::string& isa) {
    const size_t count = c.shape(0), rows = c.shape(1), columns = c.shape(2), terms = a.shape(2);
    auto fits = [count](const Stack& s) { return s.shape(0) == count || s.shape(0) == 1; };
    if (!fits(a) || !fits(b) || a.shape(1) != rows || b.shape(1) != terms || b.shape(2) != columns ||
        (columns > 1 && c.stride(2) != 1) || (bias && bias->shape(0) != columns))
        throw std::invalid_argument("these matrices cannot be multiplied into c");
    auto stack = [](const Stack& s) {
        return Matrices{s.data(), s.shape(0) == 1 ? 0 : s.stride(0), s.stride(1), s.stride(2)};
    };
    const Choice choice = choose(isa);
    nb::gil_scoped_release release;
    choice.product->products(stack(a), stack(b), bias ? bias->data() : nullptr, c.data(), c.stride(0), c.stride(1),
                             int64_t(count), int64_t(rows), int64_t(columns), int64_t(terms));
}

using Table = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Totals = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Adds to out[m] the sum of the squares (or of the sizes) of row m.
void add_sizes(Table values, Totals out, bool l1, const std::string& isa) {
    if (out.shape(0) != values.shape(0) || (values.shape(1) > 1 && values.stride(1) != 1))
        throw std::invalid_argument("sizes need rows of adjacent numbers and a place for each");
    const Choice choice = choose(isa);
    nb::gil_scoped_release release;
    for (size_t m = 0; m < values.shape(0); ++m)
        out.data()[m] += choice.product->size(values.data() + int64_t(m) * values.stride(0), int64_t(values.shape(1)), l1);
}

// Adds to sum the rows of values with their factors.
void add_rows(Totals sum, Table values, Totals factors, const std::string& isa) {
    if (factors.shape(0) != values.shape(0) || sum.shape(0) != values.shape(1) || (values.shape(1) > 1 && values.stride(1) != 1))
        throw std::invalid_argument("a sum needs rows of adjacent numbers and a factor for each");
    const Choice choice = choose(isa);
    nb::gil_scoped_release release;
    choice.product->add(sum.data(), values.data(), values.stride(0), factors.data(), int64_t(values.shape(0)),
                        int64_t(values.shape(1)));
}

using LongOut = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

std::vector<std::string> mask_ciphers() {
    std::vector<std::string> out;
    for (const char* name : {"vaes512", "vaes", "aes"})
        if (mask_kernels(name)) out.emplace_back(name);
    return out;
}

// Adds the masks of keys (32 bytes each, one after the other) to words; signs: a byte 0 subtracts that mask.
template <class Word>
void add_masks(nb::ndarray<Word, nb::ndim<1>, nb::c_contig, nb::device::cpu> words, nb::bytes keys, nb::bytes signs,
               const std::string& cipher) {
    if (keys.size() != 32 * signs.size()) throw std::invalid_argument("a mask has a key of 32 bytes and a sign");
    const MaskKernels* kernels = mask_kernels(cipher.c_str());
    if (!kernels) throw std::invalid_argument("this CPU or build has no cipher '" + cipher + "'");
    std::vector<MaskKey> schedules(signs.size());
    for (size_t m = 0; m < signs.size(); ++m) {
        kernels->expand(reinterpret_cast<const uint8_t*>(keys.c_str()) + 32 * m, schedules[m]);
        schedules[m].subtract = signs.c_str()[m] == 0;
    }
    uint8_t* data = reinterpret_cast<uint8_t*>(words.data());
    nb::gil_scoped_release release;
    (sizeof(Word) == 4 ? kernels->add32 : kernels->add64)(schedules.data(), int(schedules.size()), data,
                                                           words.size() * sizeof(Word));
    wipe(schedules.data(), schedules.size() * sizeof(MaskKey));
}

// An array of `count` integers that fill(choice, cipher, stream, out) writes.
template <class F>
LongOut integers(nb::bytes key, int64_t step, int64_t count, int64_t example, uint32_t purpose, const std::string& isa, F fill) {
    if (key.size() != 16) throw std::invalid_argument("a noise key has 16 bytes");
    if (count < 0 || count >= int64_t(1) << 31) throw std::invalid_argument("a noise stream has no such values");
    const Choice choice = choose(isa);
    int64_t* out = static_cast<int64_t*>(std::malloc(size_t(count > 0 ? count : 1) * sizeof(int64_t)));
    if (!out) throw std::bad_alloc();
    nb::capsule owner(out, [](void* p) noexcept { std::free(p); });
    AesKey schedule;
    expand_key(reinterpret_cast<const uint8_t*>(key.c_str()), schedule);
    {
        nb::gil_scoped_release release;
        fill(*choice.noise->exact, cipher_for(isa), Stream{&schedule, uint32_t(step), uint32_t(example), purpose}, out);
    }
    return LongOut(out, {size_t(count)}, owner);
}

void check_width(double width) {
    if (!(width >= kNarrowestExact && width <= kWidestExact)) throw std::invalid_argument("noise must be 0.25 to 2**46 steps wide");
}

LongOut exact_gaussians(nb::bytes key, int64_t step, int64_t count, double deviation, int64_t example, const std::string& isa) {
    check_width(deviation);
    return integers(key, step, count, example, EXACT_GAUSSIAN, isa, [&](auto& kernels, Cipher cipher, Stream stream, int64_t* out) {
        fill_exact(kernels, cipher, stream, exact_gaussian(deviation), count, out);
    });
}

LongOut exact_laplaces(nb::bytes key, int64_t step, int64_t count, double scale, int64_t example, const std::string& isa) {
    check_width(scale);
    return integers(key, step, count, example, EXACT_LAPLACE, isa, [&](auto& kernels, Cipher cipher, Stream stream, int64_t* out) {
        fill_exact(kernels, cipher, stream, exact_laplace(scale), count, out);
    });
}

// shape: period, inner, half, per, threshold (protect.exact.Stairs).
Stairs read_stairs(const std::vector<uint64_t>& f) {
    if (f.size() != 5 || f[1] < 1 || f[0] <= f[1] || f[0] > uint64_t(1) << 45 || f[2] < 1 || f[2] > uint64_t(1) << 46 || f[3] < 1 || f[4] < 1)
        throw std::invalid_argument("impossible Staircase shape");
    return {int64_t(f[0]), int64_t(f[1]), int64_t(f[2]), int64_t(f[3]), f[4]};
}

LongOut exact_staircases(nb::bytes key, int64_t step, int64_t count, const std::vector<uint64_t>& shape, int64_t example,
                         bool joint, const std::string& isa) {
    const Stairs stairs = read_stairs(shape);
    bool done = true;
    LongOut out = integers(key, step, count, example, joint ? EXACT_JOINT : EXACT_STAIRCASE, isa,
                           [&](auto& kernels, Cipher cipher, Stream stream, int64_t* to) {
                               if (joint) done = fill_joint(kernels, cipher, stream, stairs, count, to);
                               else fill_staircase(kernels, cipher, stream, stairs, count, to);
                           });
    if (!done) throw std::invalid_argument("no attempt was accepted; lambda is too large for rejection");
    return out;
}

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using DoubleMatrix = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int kFields = 19;

Net read_net(const Longs& layers, const Floats& eps, const Longs& unit_begin, int64_t inputs, int64_t outputs) {
    if (layers.ndim() != 2 || layers.shape(1) != kFields || layers.shape(0) < 1 || layers.shape(0) > size_t(kMaxLayers))
        throw std::invalid_argument("layers must be [1 … 128, 19]");
    Net net{};
    net.count = int32_t(layers.shape(0));
    net.units = int32_t(unit_begin.size()) - 1;
    if (net.units < 1 || net.units > kMaxLayers) throw std::invalid_argument("1 … 128 layers with parameters");
    for (int u = 0; u <= net.units; ++u) net.unit_begin[u] = unit_begin.data()[u];
    net.params = net.unit_begin[net.units];
    net.inputs = inputs;
    net.outputs = int32_t(outputs);
    for (int i = 0; i < net.count; ++i) {
        const int64_t* f = layers.data() + i * kFields;
        Layer& l = net.layers[i];
        int32_t* fields[] = {&l.kind, &l.unit, &l.c, &l.h, &l.w, &l.oc, &l.oh, &l.ow, &l.kh, &l.kw, &l.sh, &l.sw, &l.ph, &l.pw, &l.groups, &l.from, &l.also};
        for (int j = 0; j < 17; ++j) *fields[j] = int32_t(f[j]);
        l.weight = f[17], l.bias = f[18], l.eps = eps.data()[i];
        if (l.from < -1 || l.from >= i || l.also < -1 || l.also >= i) throw std::invalid_argument("a layer takes one that comes later");
        const int64_t image = int64_t(net.layers[0].c) * net.layers[0].h * net.layers[0].w;
        if (l.kind == FLATTEN && int64_t(l.oc) != int64_t(l.c) * l.h * l.w + inputs - image)
            throw std::invalid_argument("a Flatten layer does not fit the model's input");
    }
    return net;
}

struct Room {  // a workspace
    std::unique_ptr<char, void (*)(void*)> at{nullptr, std::free};
    size_t size = 0;
};

// The one thing that outlives a call: large workspaces, because the system needs longer to clear their pages than a small net
// needs to train. At most kMostRooms of them and kMostBytes in all; whatever is larger is given back at once. No result depends
// on what they hold: engine.inc clears or writes every number before it reads it. They are freed with the process.
class SpareRooms {
public:
    Room take(size_t bytes) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            for (size_t i = 0; i < rooms.size(); ++i)
                if (rooms[i].size >= bytes) {
                    Room room = std::move(rooms[i]);
                    rooms.erase(rooms.begin() + std::ptrdiff_t(i));
                    return room;
                }
            rooms.clear();  // all too small
        }
        const size_t page = bytes >= kLargeRoom ? size_t(1) << 21 : 64;
        Room room;
        room.size = (bytes + page - 1) / page * page;
        room.at.reset(static_cast<char*>(std::aligned_alloc(page, room.size)));
        if (!room.at) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (page > 64) madvise(room.at.get(), room.size, MADV_HUGEPAGE);
#endif
        return room;
    }

    void keep(std::vector<Room>& used) {
        const std::lock_guard<std::mutex> lock(mutex);
        size_t held = 0;
        for (const Room& room : rooms) held += room.size;
        for (Room& room : used)
            if (room.size >= kLargeRoom && rooms.size() < kMostRooms && held + room.size <= kMostBytes) {
                held += room.size;
                rooms.push_back(std::move(room));
            }
    }

private:
    static constexpr size_t kLargeRoom = size_t(1) << 24, kMostRooms = 2, kMostBytes = size_t(1) << 30;
    std::mutex mutex;
    std::vector<Room> rooms;
};
SpareRooms spare_rooms;

const float* vector_or_null(nb::handle value, int64_t size, std::vector<nb::object>& keep) {
    if (value.is_none()) return nullptr;
    Floats array = nb::cast<Floats>(value);
    if (int64_t(array.size()) != size) throw std::invalid_argument("a client's vector has the wrong length");
    keep.push_back(nb::borrow(value));
    return array.data();
}

// Results go into delta [K, P], norms [2, K * units] (mean, max), facts [K, 7]:
// finite, loss, unclipped, noise scale, examples, below count, skipped; and of_mean [K, steps], or [K, 0] where not wanted.
void train(const Longs& layers, const Floats& eps, const Longs& unit_begin, int64_t inputs, int64_t outputs, nb::dict settings,
           const Floats& x, std::optional<Longs> labels, std::optional<Floats> targets, const Floats& start,
           nb::list clients, FloatMatrix delta, DoubleMatrix norms, DoubleMatrix facts, DoubleMatrix of_mean, int threads,
           const std::string& isa) {
    const Net net = read_net(layers, eps, unit_begin, inputs, outputs);
    const Choice choice = choose(isa);
    const Cipher cipher = cipher_for(isa);

    Plan plan{};
    plan.steps = nb::cast<int>(settings["steps"]);
    plan.learning_rate = nb::cast<double>(settings["learning_rate"]);
    plan.expected_batch = nb::cast<double>(settings["expected_batch"]);
    plan.momentum = nb::cast<double>(settings["momentum"]);
    plan.proximal = nb::cast<double>(settings["proximal"]);
    plan.penalty = nb::cast<double>(settings["penalty"]);
    plan.grid = nb::cast<double>(settings["grid"]);
    plan.clip = nb::cast<int>(settings["clip"]);
    plan.noise = nb::cast<int>(settings["noise"]);
    plan.for_each = nb::cast<bool>(settings["for_each"]);
    plan.l1 = nb::cast<bool>(settings["l1"]);
    plan.median = nb::cast<bool>(settings["median"]);
    plan.l2_max = nb::cast<bool>(settings["l2_max"]);
    plan.of_mean = nb::cast<bool>(settings["of_mean"]);
    plan.squared = nb::cast<bool>(settings["squared"]);
    plan.only_sum = nb::cast<bool>(settings["only_sum"]);
    std::vector<nb::object> keep;
    auto doubles = [&](const char* name) -> const double* {
        nb::object value = settings[name];
        if (value.is_none()) return nullptr;
        Doubles array = nb::cast<Doubles>(value);
        if (int64_t(array.size()) != plan.steps) throw std::invalid_argument(std::string(name) + " needs one value a step");
        keep.push_back(value);
        return array.data();
    };
    plan.bounds = doubles("bounds");
    plan.scales = doubles("scales");
    plan.deviations = doubles("deviations");
    plan.lambdas = doubles("lambdas");
    plan.nus = doubles("nus");
    const double *per_lambda = doubles("per_lambda"), *threshold = doubles("threshold");
    const double *slope_in = doubles("slope_in"), *slope_out = doubles("slope_out");
    std::vector<StaircaseShape> shapes;
    if (per_lambda && threshold && slope_in && slope_out) {
        for (int i = 0; i < plan.steps; ++i)
            shapes.push_back({float(per_lambda[i]), uint32_t(threshold[i]), float(slope_in[i]), float(slope_out[i])});
        plan.shapes = shapes.data();
    }
    if (plan.noise && (!plan.scales || !plan.deviations)) throw std::invalid_argument("noise needs scales and deviations");
    std::vector<Stairs> stairs;
    if (!settings["stairs"].is_none())
        for (nb::handle one : nb::cast<nb::list>(settings["stairs"])) stairs.push_back(read_stairs(nb::cast<std::vector<uint64_t>>(one)));
    plan.stairs = stairs.data();
    if (plan.grid > 0 && (plan.noise == STAIRCASE_LAW || plan.noise == JOINT_LAW) && stairs.size() != size_t(plan.steps))
        throw std::invalid_argument("Staircase noise on a grid needs a shape for each step");
    if (plan.clip && !plan.bounds) throw std::invalid_argument("clipping needs bounds");
    if ((plan.noise == STAIRCASE_LAW && !plan.shapes) || (plan.noise == JOINT_LAW && (!plan.lambdas || !plan.nus)))
        throw std::invalid_argument("staircase noise needs its shape");

    const int64_t rows_available = x.ndim() ? int64_t(x.shape(0)) : 0;
    if (int64_t(x.size()) != rows_available * inputs) throw std::invalid_argument("x does not fit the model's input");
    if (int64_t(start.size()) != net.params) throw std::invalid_argument("start does not fit the model's parameters");
    if (plan.squared ? !targets || int64_t(targets->size()) != rows_available * outputs
                     : !labels || int64_t(labels->size()) != rows_available)
        throw std::invalid_argument("y does not fit x and the loss");
    const Data data = {x.data(), plan.squared ? nullptr : labels->data(), plan.squared ? targets->data() : nullptr,
                       start.data()};

    const int64_t count = int64_t(nb::len(clients)), measured = plan.clip == CLIP_FLAT ? 1 : net.units;
    if (int64_t(delta.shape(0)) != count || int64_t(delta.shape(1)) != net.params || norms.shape(0) != 2 ||
        int64_t(norms.shape(1)) != count * measured || int64_t(facts.shape(0)) != count || facts.shape(1) != 7 ||
        int64_t(of_mean.shape(0)) != count || (int64_t(of_mean.shape(1)) != plan.steps && (of_mean.shape(1) || plan.of_mean)))
        throw std::invalid_argument("result arrays have the wrong shape");
    std::vector<Client> work;
    for (nb::handle item : clients) {
        nb::tuple t = nb::cast<nb::tuple>(item);
        Ints rows = nb::cast<Ints>(t[0]);
        nb::bytes key = nb::cast<nb::bytes>(t[1]);
        if (int64_t(rows.shape(0)) != plan.steps) throw std::invalid_argument("rows needs one line a step");
        if (key.size() != 16) throw std::invalid_argument("a noise key has 16 bytes");
        for (size_t i = 0; i < rows.size(); ++i) {
            const int64_t row = rows.data()[i];
            if (row < -1 || row >= rows_available) throw std::invalid_argument("a row number is outside x");
            if (row >= 0 && !plan.squared && (data.labels[row] < 0 || data.labels[row] >= outputs))
                throw std::invalid_argument("a label is outside the model's outputs");
        }
        keep.push_back(nb::borrow(item));
        Client client = {rows.data(), int32_t(rows.shape(1)), reinterpret_cast<const uint8_t*>(key.c_str()), nullptr, nullptr, nullptr, nullptr};
        client.control = vector_or_null(t[2], net.params, keep);
        client.anchor = vector_or_null(t[3], net.params, keep);
        client.shift = vector_or_null(t[4], net.params, keep);
        client.scale = vector_or_null(t[5], net.params, keep);
        work.push_back(client);
    }
    int64_t bytes = 64;
    for (const Client& client : work) bytes = std::max(bytes, choice.engine->workspace(net, plan, client));
    const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, count)));
    std::vector<Room> space;
    for (int i = 0; i < workers; ++i) space.push_back(spare_rooms.take(size_t(bytes)));
    nb::gil_scoped_release release;
    std::atomic<int64_t> next{0};
    auto worker = [&](char* workspace) {
        for (int64_t k; (k = next.fetch_add(1)) < count;) {
            Result r{};
            r.delta = delta.data() + k * net.params;
            r.norm_mean = norms.data() + k * measured;
            r.norm_max = norms.data() + (count + k) * measured;
            if (of_mean.shape(1)) r.of_mean = of_mean.data() + k * plan.steps;
            choice.engine->train(net, plan, data, work[size_t(k)], *choice.noise, cipher, workspace, r);
            double* f = facts.data() + k * 7;
            f[0] = r.finite, f[1] = r.loss, f[2] = r.unclipped;
            f[3] = r.noise_scale, f[4] = double(r.examples), f[5] = r.below, f[6] = double(r.skipped);
        }
    };
    std::vector<std::thread> pool;
    for (int i = 1; i < workers; ++i) pool.emplace_back(worker, space[size_t(i)].at.get());
    worker(space[0].at.get());
    for (std::thread& thread : pool) thread.join();
    spare_rooms.keep(space);
}

}  // namespace

NB_MODULE(_native, m) {
    m.attr("VERSION") = 7;  // of this interface; protect.noise checks it
    m.def("instruction_sets", &instruction_sets);
    m.def("exact_gaussian", &exact_gaussians, nb::arg("key"), nb::arg("step"), nb::arg("count"), nb::arg("deviation"),
          nb::arg("example") = 0, nb::arg("isa") = "auto");
    m.def("exact_laplace", &exact_laplaces, nb::arg("key"), nb::arg("step"), nb::arg("count"), nb::arg("scale"),
          nb::arg("example") = 0, nb::arg("isa") = "auto");
    m.def("exact_staircase", &exact_staircases, nb::arg("key"), nb::arg("step"), nb::arg("count"), nb::arg("shape"),
          nb::arg("example") = 0, nb::arg("joint") = false, nb::arg("isa") = "auto");
    m.def("products", &products, nb::arg("a"), nb::arg("b"), nb::arg("c").noconvert(), nb::arg("bias").none() = nb::none(),
          nb::arg("isa") = "auto");
    m.def("add_sizes", &add_sizes, nb::arg("values"), nb::arg("out").noconvert(), nb::arg("l1") = false, nb::arg("isa") = "auto");
    m.def("add_rows", &add_rows, nb::arg("sum").noconvert(), nb::arg("values"), nb::arg("factors"), nb::arg("isa") = "auto");
    m.def("mask_ciphers", &mask_ciphers);
    m.def("add_masks", &add_masks<uint32_t>, nb::arg("words").noconvert(), nb::arg("keys"), nb::arg("signs"), nb::arg("cipher"));
    m.def("add_masks", &add_masks<uint64_t>, nb::arg("words").noconvert(), nb::arg("keys"), nb::arg("signs"), nb::arg("cipher"));
    m.def("normals",
          [](nb::bytes key, int64_t step, int64_t count, int64_t first, int64_t example, const std::string& isa) {
              return noise(key, step, count, first, example, NORMAL, nullptr, isa);
          },
          nb::arg("key"), nb::arg("step"), nb::arg("count"), nb::arg("first") = 0, nb::arg("example") = 0,
          nb::arg("isa") = "auto");
    m.def("fill_normals", &fill_normals, nb::arg("keys"), nb::arg("step"), nb::arg("factors"), nb::arg("out").noconvert(),
          nb::arg("isa") = "auto");
    m.def("laplaces",
          [](nb::bytes key, int64_t step, int64_t count, int64_t first, int64_t example, int64_t purpose,
             const std::string& isa) {
              if (purpose != LAPLACE && purpose != JOINT) throw std::invalid_argument("not a Laplace purpose");
              return noise(key, step, count, first, example, uint32_t(purpose), nullptr, isa);
          },
          nb::arg("key"), nb::arg("step"), nb::arg("count"), nb::arg("first") = 0, nb::arg("example") = 0,
          nb::arg("purpose") = int64_t(LAPLACE), nb::arg("isa") = "auto");
    m.def("staircases",
          [](nb::bytes key, int64_t step, int64_t count, int64_t first, int64_t example, double per_lambda,
             int64_t threshold, double slope_in, double slope_out, const std::string& isa) {
              const StaircaseShape shape = {float(per_lambda), uint32_t(threshold), float(slope_in), float(slope_out)};
              return noise(key, step, count, first, example, STAIRCASE, &shape, isa);
          },
          nb::arg("key"), nb::arg("step"), nb::arg("count"), nb::arg("first"), nb::arg("example"),
          nb::arg("per_lambda"), nb::arg("threshold"), nb::arg("slope_in"), nb::arg("slope_out"),
          nb::arg("isa") = "auto");
    m.def("train", &train, nb::arg("layers"), nb::arg("eps"), nb::arg("unit_begin"), nb::arg("inputs"),
          nb::arg("outputs"), nb::arg("settings"), nb::arg("x"), nb::arg("labels").none(), nb::arg("targets").none(),
          nb::arg("start"), nb::arg("clients"), nb::arg("delta"), nb::arg("norms"), nb::arg("facts"),
          nb::arg("of_mean"), nb::arg("threads"), nb::arg("isa") = "auto");
}

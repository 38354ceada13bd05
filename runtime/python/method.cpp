// File and Method: torch tensors in and out, without ExecuTorch's Python runtime.
#include "executorch/method.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "python/bindings.h"

namespace keepdim {

namespace {

nb::object call_method(nb::handle object, PyObject* name) {
  nb::object result = nb::steal(PyObject_CallMethodNoArgs(object.ptr(), name));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

void* tensor_data(nb::handle tensor) {
  void* data = PyLong_AsVoidPtr(call_method(tensor, names().data_ptr).ptr());
  if (!data && PyErr_Occurred()) throw nb::python_error();
  return data;
}

// Collects results as Python objects. The run releases the GIL; it is reacquired to create each object.
class TorchResults final : public ResultSink {
 public:
  void* tensor(DType dtype, const int64_t* sizes, size_t rank) override {
    const nb::gil_scoped_acquire gil;
    const nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(rank)));
    for (size_t d = 0; d < rank; ++d) PyTuple_SET_ITEM(shape.ptr(), d, PyLong_FromLongLong(sizes[d]));
    PyObject* torch_dtype = nullptr;
    for (const auto& [object, known] : dtypes()) {
      if (known == dtype) torch_dtype = object;
    }
    static PyObject* const empty = nb::object(nb::module_::import_("torch").attr("empty")).release().ptr();
    static PyObject* const keywords = nb::make_tuple("dtype", "device").release().ptr();
    static PyObject* const cpu = nb::str("cpu").release().ptr();  // independent of the default device
    PyObject* const arguments[] = {shape.ptr(), torch_dtype, cpu};
    nb::object created = nb::steal(PyObject_Vectorcall(empty, arguments, 1, keywords));
    if (!created.is_valid()) throw nb::python_error();
    void* const data = tensor_data(created);
    if (!data && std::find(sizes, sizes + rank, 0) == sizes + rank) {
      fail(Code::not_supported, "[run] output " + std::to_string(nb::len(out)) +
                                    ": torch gives no memory for it here. "
                                    "Call outside of FakeTensorMode, torch.vmap and torch.func.");
    }
    out.append(created);
    return data;
  }
  void integer(int64_t value) override {
    add([&] { return nb::object(nb::int_(value)); });
  }
  void number(double value) override {
    add([&] { return nb::object(nb::float_(value)); });
  }
  void boolean(bool value) override {
    add([&] { return nb::object(nb::bool_(value)); });
  }
  void text(const std::string& value) override {
    add([&] {
      nb::object created = nb::steal(PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), nullptr));
      if (!created.is_valid()) {
        PyErr_Clear();
        fail(Code::invalid_program, "[run] output " + std::to_string(nb::len(out)) + ": its text is not UTF-8.");
      }
      return created;
    });
  }
  void none() override {
    add([] { return nb::object(nb::none()); });
  }

  nb::list out;

 private:
  template <typename Make>
  void add(const Make& make) {
    const nb::gil_scoped_acquire gil;
    out.append(make());
  }
};

void open_file(PteFile* file, const nb::bytes& path, bool verify) {
  const std::string name(path.c_str(), path.size());
  const nb::gil_scoped_release release;
  new (file) PteFile(name, verify);
}

class PyMethod {
 public:
  PyMethod(std::shared_ptr<PteFile> file, const std::string& name, const nb::bytes& weights, const Spans& spans)
      : method_(std::move(file), name, {{weights.c_str(), weights.size()}, spans}) {}

  // Inputs as returned by Contract.inputs: contiguous CPU tensors, numbers, bools.
  nb::list call(nb::handle arguments) { return run(arguments, nullptr); }

  // The same with profiling events: (name, metadata from the delegate, start, end, inside a delegate).
  nb::tuple profile(nb::handle arguments) {
    std::vector<MethodEvent> events;
    nb::list results = run(arguments, &events), rows;
    for (const MethodEvent& e : events) rows.append(nb::make_tuple(e.name, e.metadata, e.start, e.end, e.delegated));
    return nb::make_tuple(results, rows);
  }

  size_t planned_bytes() const { return method_.planned_bytes(); }

 private:
  nb::list run(nb::handle arguments, std::vector<MethodEvent>* events) {
    std::vector<MethodInput> inputs;
    std::vector<std::vector<int64_t>> sizes;
    for (nb::handle object : arguments) inputs.push_back(read(object, sizes));
    TorchResults results;
    {
      const nb::gil_scoped_release release;
      method_.run(inputs.data(), inputs.size(), results, events);
    }
    return std::move(results.out);
  }

  static MethodInput read(nb::handle object, std::vector<std::vector<int64_t>>& sizes) {
    MethodInput in;
    if (object.is_none()) {
      in.kind = MethodInput::Kind::none;
    } else if (PyBool_Check(object.ptr())) {
      in.kind = MethodInput::Kind::boolean;
      in.boolean = object.is(Py_True);
    } else if (PyFloat_Check(object.ptr())) {
      in.kind = MethodInput::Kind::number;
      in.number = PyFloat_AS_DOUBLE(object.ptr());
    } else if (PyLong_Check(object.ptr())) {
      in.argument.value = nb::cast<int64_t>(object);
    } else {
      const nb::object dtype = nb::steal(PyObject_GetAttr(object.ptr(), names().dtype));
      const nb::object shape = dtype.is_valid() ? nb::steal(PyObject_GetAttr(object.ptr(), names().shape)) : nb::object();
      if (!shape.is_valid()) throw nb::python_error();
      for (const auto& [known, name] : dtypes()) {
        if (known == dtype.ptr()) in.argument.dtype = name;
      }
      sizes.emplace_back();
      for (nb::handle size : shape) sizes.back().push_back(PyLong_AsLongLong(size.ptr()));
      in.argument.rank = sizes.back().size();
      in.argument.sizes = sizes.back().data();  // stays valid when the outer vector grows
      in.argument.data = tensor_data(object);
      if (!in.argument.data && std::find(sizes.back().begin(), sizes.back().end(), 0) == sizes.back().end()) {
        fail(Code::invalid_argument,
             "[bind] input " + std::to_string(sizes.size() - 1) + ": is a tensor without memory. Give one that is on the CPU.");
      }
    }
    return in;
  }

  Method method_;
};

}  // namespace

void add_method(nb::module_& m) {
  nb::class_<PteFile>(m, "File")
      .def("__init__", open_file, "path"_a, "verify"_a = false, "A .pte, checked; with `verify` its weights too.")
      .def("fileno", &PteFile::descriptor)
      .def_prop_ro("size", &PteFile::program_bytes, "Bytes before the trailer.")
      .def_prop_ro("sha256", &PteFile::sha256, "Of everything but the weights.")
      .def_prop_ro(
          "weights",
          [](const PteFile& file) {
            nb::list out;
            for (const WeightSpan& w : file.weights()) out.append(nb::make_tuple(w.key, w.offset, w.size, w.sha256));
            return out;
          },
          "(key, offset, bytes, sha256) of each.");
  nb::class_<PyMethod>(m, "Method")
      .def(nb::init<std::shared_ptr<PteFile>, const std::string&, const nb::bytes&, const Spans&>(), "file"_a, "name"_a,
           "weights"_a = nb::bytes("", 0), "spans"_a = nb::dict())
      .def("__call__", &PyMethod::call, "inputs"_a, "Run on ExecuTorch's inputs in order; its outputs in order.")
      .def("profile", &PyMethod::profile, "inputs"_a, "The same with every event of the run: name, about, start, end, delegated.")
      .def_prop_ro("planned_bytes", &PyMethod::planned_bytes);
}

}  // namespace keepdim

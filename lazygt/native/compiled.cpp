// Code that AOTInductor has compiled, as one model that is called directly. Torch's own loader keeps
// a pool of models and waits by an event for an earlier call of the model that it takes, so a CUDA
// graph can't capture its calls.
#include "module.h"
#include "python.h"

#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lazygt {
namespace {

class CompiledCode {
 public:
  CompiledCode(const std::string& path, const std::string& device) {
    const auto kind = device.substr(0, device.find(':'));
    auto& makers = torch::inductor::getAOTIModelRunnerRegistry();
    auto maker = makers.find(kind);
    TORCH_CHECK(maker != makers.end(), "this build of torch loads no compiled code for ", kind);
    runner_ = maker->second(path, 1, device, "", /*run_single_threaded=*/true);
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& operands) {
    const std::lock_guard alone(mutex_);
    return runner_->run(operands);
  }

 private:
  std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner_;
  std::mutex mutex_;  // sessions in one process share code
};

}  // namespace

void bind_compiled(py::module_& m) {
  py::class_<CompiledCode>(m, "CompiledCode")
      .def(py::init<const std::string&, const std::string&>())
      .def("run", &CompiledCode::run, py::call_guard<py::gil_scoped_release>());
}

}  // namespace lazygt

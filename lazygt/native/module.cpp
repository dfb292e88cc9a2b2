#include "module.h"

// TORCH_EXTENSION_NAME is the name that the build gives the extension.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace lazygt;
  if (bind_recorder) bind_recorder(m);
  if (bind_executor) bind_executor(m);
  if (bind_runs) bind_runs(m);
  if (bind_mailboxes) bind_mailboxes(m);
  if (bind_accelerator) bind_accelerator(m);
  if (bind_compiled) bind_compiled(m);
}

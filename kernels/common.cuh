// What every kernel shares. NVRTC finds it by name; it is part of the cache's key.
#pragma once

#include <cuda_bf16.h>

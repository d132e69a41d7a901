#include "noise_values.inc"

#include "exact.inc"

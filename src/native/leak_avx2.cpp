#include "leak.inc"

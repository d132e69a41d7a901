#include "engine.inc"

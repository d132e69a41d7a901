#include "products.inc"

/* cpu.h - what the files of the CPU backend share: the entries of its table. */
#ifndef PK_CPU_H
#define PK_CPU_H

#include "pk.h"

#endif

// A decoded instruction, as decode.py fills it in. The ctypes structures of core.py mirror these two.
#pragma once

#include <cstdint>

namespace gfx9 {

constexpr int kLanes = 64;

struct Wave;
struct Instruction;
using Handler = void (*)(Wave&, const Instruction&);

enum class Kind : uint8_t { none, vector, scalar, constant, scc };

struct Operand {
  Kind kind;
  uint8_t negate, absolute, sign_extend;
  uint8_t select;   // SDWA: 0 the dword, 1 to 4 a byte, 5 and 6 a half
  uint16_t first;   // register; accumulation registers are vector registers from 256 on
  uint16_t count;   // consecutive registers
  uint16_t bits16;  // a constant, as a 16-bit operand reads it
  uint32_t bits32;
  uint64_t bits64;
};

// Where elements of a matrix instruction lie: index [lane][element] of each operand in a dense array.
struct MatrixLayout {
  int32_t rows, columns, depth, blocks;
  int32_t elements;            // of A, and of B, in a lane
  int32_t results;             // registers of D in a lane
  const uint16_t* a;           // [64][elements] -> [block][row][k]
  const uint16_t* b;           // [64][elements] -> [block][k][column]
  const uint16_t* d;           // [64][results] -> [block][row][column]
  int32_t a_format, b_format;  // Format in matrix.h
  int32_t scaled;
};

struct Instruction {
  Handler run;
  uint64_t address;    // in the loaded code object
  Operand operand[6];  // in the order of the text, results first
  int32_t operands;
  int32_t offset[2];     // bytes; of ds_read2 and its like both, already multiplied
  int32_t target;        // of a branch: index of an instruction
  int32_t immediate[3];  // s_waitcnt: vmcnt, lgkmcnt; hwreg: register, first bit, bits; v_bitop3: the table
  uint8_t op_sel[4], op_sel_hi[4], neg_lo[4], neg_hi[4];
  uint8_t clamp;
  uint8_t output_scale;  // 0 none, 1 times 2, 2 times 4, 3 half
  uint8_t dpp, bound_zero;
  uint8_t sdwa, result_select, result_unused;  // as Operand::select; unused bits: 0 zero, 1 sign, 2 kept
  uint8_t returns;                             // an atomic operation returns the old value
  uint8_t lane_source[kLanes];                 // DPP and ds_swizzle: the lane that each lane reads
  uint64_t lane_valid;                         // DPP: lanes whose source exists
  uint64_t lane_enabled;                       // DPP: lanes that row and bank mask let be written
  const MatrixLayout* matrix;
};

}  // namespace gfx9

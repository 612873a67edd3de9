// The rule of the work split, in closed form for one unit at a time, so that planners on every device agree bit for
// bit.
//
// A unit is what is cut: a request, whose row tiles then run side by side in a group of `width` parts, so that its keys
// come from memory once; or, where requests differ in their tiles, one tile in a group of one part. Partial results are
// written and read again, so units are cut as little as even parts allow. Of these ways the first that fits is taken:
//   whole     no unit is cut, each group takes the same number of units
//   even      a group takes one piece: a unit is cut into equal ones, as many as its length asks for
//   line      all units lie on one line, each as long as its cost (overhead_blocks, then its blocks), and the line is
//             cut into equal lengths. Equal cost for every part is what FlashMLA's scheduler aims at too; there one
//             thread walks the batch, here a unit finds its cuts from the sum of the costs in front of it
// With batch_invariant a unit is cut by its own length alone, and its pieces are dealt along the line.
#pragma once

#include <cstdint>

#include "kernels/params.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define MLA_HOST_DEVICE __host__ __device__
#else
#define MLA_HOST_DEVICE
#endif

namespace mla {

// batch_invariant: a unit is cut into at most this many pieces ...
constexpr int32_t kInvariantMaxSplits = 32;
// ... of at least this many blocks.
constexpr int32_t kInvariantMinBlocks = 32;
// Planners keep an offset for each group at hand.
constexpr int32_t kMaxGroupedParts = 8192;
// Lengths of an even piece that are tried, from the even share up.
constexpr int32_t kEvenTrials = 8;

MLA_HOST_DEVICE inline int32_t ceil_div(int32_t a, int32_t b) { return a / b + (a % b != 0); }
MLA_HOST_DEVICE inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
MLA_HOST_DEVICE inline int32_t min_of(int32_t a, int32_t b) { return a < b ? a : b; }
MLA_HOST_DEVICE inline int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }
MLA_HOST_DEVICE inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
MLA_HOST_DEVICE inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// Query tokens of request b, never negative and never more than max_q_len, whatever the array holds.
MLA_HOST_DEVICE inline int32_t query_count(const int32_t* cu_q_lens, int32_t b, int32_t max_q_len) {
  if (cu_q_lens == nullptr) return max_q_len;
  const int64_t count = int64_t{cu_q_lens[b + 1]} - cu_q_lens[b];
  return count < 0 ? 0 : count > max_q_len ? max_q_len : static_cast<int32_t>(count);
}

// Both are 0 for a request without keys or queries.
struct RequestWork {
  int32_t blocks;  // of keys
  int32_t tiles;   // row tiles that its queries fill
};

MLA_HOST_DEVICE inline RequestWork request_work(const PlanDecodeParams& p, int32_t request) {
  const int32_t kv_len = p.kv_lens[request];
  int32_t tiles = p.plan.row_tiles;
  if (p.cu_q_lens != nullptr) {
    const int64_t rows = int64_t{query_count(p.cu_q_lens, request, p.max_q_len)} * p.heads;
    tiles = static_cast<int32_t>(min_of(ceil_div(rows, int64_t{p.plan.tile_rows}), int64_t{p.plan.row_tiles}));
  }
  if (kv_len <= 0 || tiles == 0) return {0, 0};
  return {ceil_div(kv_len, kBlockTokens), tiles};
}

// What the rule has to know of a whole batch.
struct BatchWork {
  int32_t requests;  // that have work
  int32_t tiles;     // of all requests
  int64_t blocks;    // of all requests
  int64_t tile_blocks;
  int32_t longest;  // blocks of a request
  int32_t most_tiles, fewest_tiles;

  static MLA_HOST_DEVICE BatchWork none() { return {0, 0, 0, 0, 0, 0, 0x7FFFFFFF}; }

  MLA_HOST_DEVICE void add(RequestWork work) {
    if (work.blocks == 0) return;
    requests += 1;
    tiles += work.tiles;
    blocks += work.blocks;
    tile_blocks += int64_t{work.blocks} * work.tiles;
    longest = max_of(longest, work.blocks);
    most_tiles = max_of(most_tiles, work.tiles);
    fewest_tiles = min_of(fewest_tiles, work.tiles);
  }
};

enum class Cut : int32_t { kWhole, kEven, kLine, kInvariant };

struct SplitRule {
  Cut cut;
  bool by_request;         // a unit is a request, else a tile
  int32_t width;           // parts of a group, and tiles of a unit
  int32_t groups;          // group g has the parts [g * width, (g + 1) * width)
  int32_t units;           // those without work counted too
  int32_t units_a_group;   // whole
  int32_t capacity;        // even: blocks that a piece may have
  int64_t length;          // line and batch_invariant: of a group on the line
  int64_t even_share;      // blocks of a group
  int64_t even_share_max;  // what a piece of `even` may have
};

// A group may do this much more than its share where that saves cuts. A cut's two pieces are written and read again, in
// all the bytes of tile_rows / 9 blocks of bf16 keys; where parts are short, latency counts and not bytes.
MLA_HOST_DEVICE inline int64_t with_slack(const PlanDecodeParams& p, int64_t share, int32_t fraction) {
  return share + share / fraction + min_of(int64_t{p.plan.tile_rows / 9}, share / 4);
}

// Never `even`: whether that fits instead of `line` is for the caller to find out, where even_trials() says so.
MLA_HOST_DEVICE inline SplitRule split_rule(const PlanDecodeParams& p, const BatchWork& work) {
  constexpr int32_t kWholeFraction = 8, kEvenFraction = 12;
  SplitRule rule{};
  const bool alike = work.requests > 0 && work.fewest_tiles == work.most_tiles;
  // Parts that are left over when groups are formed have nothing to do.
  const bool grouped = alike && work.most_tiles <= p.plan.parts && p.plan.parts <= kMaxGroupedParts &&
                       p.plan.parts % work.most_tiles * 16 <= p.plan.parts;
  rule.by_request = alike && (grouped || work.most_tiles == 1);
  rule.width = rule.by_request ? work.most_tiles : 1;
  rule.groups = p.plan.parts / rule.width;
  rule.units = rule.by_request ? p.batch : p.batch * p.plan.row_tiles;
  const int64_t units = rule.by_request ? work.requests : work.tiles;  // that have work
  const int64_t blocks = rule.by_request ? work.blocks : work.tile_blocks;
  const int64_t groups = rule.groups;
  rule.length = max_of(ceil_div(blocks + units * p.overhead_blocks, groups), int64_t{max_of(p.min_part_blocks, 1)});
  rule.even_share = max_of(ceil_div(blocks, groups), int64_t{max_of(p.min_part_blocks, 1)});
  rule.even_share_max = with_slack(p, rule.even_share, kEvenFraction);
  rule.units_a_group = static_cast<int32_t>(max_of(ceil_div(units, groups), int64_t{1}));
  rule.cut = Cut::kLine;
  if (p.batch_invariant) {
    rule.cut = Cut::kInvariant;
  } else if (rule.units_a_group * (int64_t{work.longest} + p.overhead_blocks) <=
             with_slack(p, rule.length, kWholeFraction)) {
    rule.cut = Cut::kWhole;
  }
  return rule;
}

MLA_HOST_DEVICE inline bool even_trials(const SplitRule& rule) {
  return rule.cut == Cut::kLine && rule.units_a_group == 1;  // else there are more units than groups
}

// Of trial i: blocks that a piece may have. Fits a 32-bit number, since no unit is longer.
MLA_HOST_DEVICE inline int32_t even_capacity(const SplitRule& rule, int32_t trial) {
  return static_cast<int32_t>(rule.even_share + (rule.even_share_max - rule.even_share) * trial / (kEvenTrials - 1));
}

// Pieces of all the units of a request, in a trial; the sum over the batch has to be at most rule.groups.
MLA_HOST_DEVICE inline int32_t even_pieces(const SplitRule& rule, RequestWork work, int32_t capacity) {
  return ceil_div(work.blocks, capacity) * (rule.by_request ? min_of(work.tiles, 1) : work.tiles);
}

MLA_HOST_DEVICE inline void cut_evenly(SplitRule& rule, int32_t capacity) {
  rule.cut = Cut::kEven;
  rule.capacity = capacity;
}

// Blocks of a unit, 0 where it has nothing to do.
MLA_HOST_DEVICE inline int32_t unit_blocks(const PlanDecodeParams& p, const SplitRule& rule, int32_t unit) {
  if (rule.by_request) return request_work(p, unit).blocks;
  const RequestWork work = request_work(p, unit / p.plan.row_tiles);
  return unit % p.plan.row_tiles < work.tiles ? work.blocks : 0;
}

// Its length on the line.
MLA_HOST_DEVICE inline int64_t unit_cost(const PlanDecodeParams& p, int32_t blocks) {
  return blocks == 0 ? 0 : int64_t{blocks} + p.overhead_blocks;
}

struct UnitCut {
  int32_t count;        // pieces; 0 for a unit without work
  int32_t chunk;        // blocks a piece (line: not used)
  int64_t first_block;  // on the line
};

// `start` is the sum of the costs of all units before this one (only line and batch_invariant use it).
MLA_HOST_DEVICE inline UnitCut cut_unit(const PlanDecodeParams& p, const SplitRule& rule, int32_t blocks,
                                        int64_t start) {
  if (blocks == 0) return {0, 0, 0};
  const int64_t first_block = start + p.overhead_blocks;
  if (rule.cut == Cut::kLine) {
    const int64_t first = first_block / rule.length, last = (first_block + blocks - 1) / rule.length;
    return {static_cast<int32_t>(last - first + 1), 0, first_block};
  }
  int32_t wanted = 1;
  if (rule.cut == Cut::kEven) wanted = ceil_div(blocks, rule.capacity);
  if (rule.cut == Cut::kInvariant) wanted = min_of(kInvariantMaxSplits, ceil_div(blocks, kInvariantMinBlocks));
  const int32_t chunk = ceil_div(blocks, wanted);
  return {ceil_div(blocks, chunk), chunk, first_block};
}

struct Piece {
  int32_t group;
  int32_t block_begin, block_end;
};

// Piece i of a unit, the index-th of all.
MLA_HOST_DEVICE inline Piece cut_piece(const SplitRule& rule, int32_t blocks, const UnitCut& cut, int32_t i,
                                       int32_t index) {
  if (rule.cut == Cut::kLine) {
    const int64_t group = cut.first_block / rule.length + i;
    const int64_t begin = group * rule.length - cut.first_block;
    return {static_cast<int32_t>(group), static_cast<int32_t>(max_of(begin, int64_t{0})),
            static_cast<int32_t>(min_of(begin + rule.length, int64_t{blocks}))};
  }
  const int32_t begin = i * cut.chunk, end = min_of(blocks - begin, cut.chunk) + begin;
  if (rule.cut == Cut::kInvariant) return {static_cast<int32_t>((cut.first_block + begin) / rule.length), begin, end};
  return {rule.cut == Cut::kEven ? index : index / rule.units_a_group, begin, end};
}

// Bounds from shapes alone: what the arrays of a plan must hold. A cut of the line splits one unit in two, so all split
// units together have at most 2 * (groups - 1) pieces; an even split has no more pieces than groups.
inline int64_t max_items(int64_t tiles, int64_t parts, bool batch_invariant) {
  return batch_invariant ? tiles * kInvariantMaxSplits : tiles + parts;
}
inline int64_t max_partials(int64_t tiles, int64_t parts, bool batch_invariant) {
  return batch_invariant ? tiles * kInvariantMaxSplits : 2 * parts;
}

}  // namespace mla

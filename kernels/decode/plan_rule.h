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

#include "kernels/host_device.h"
#include "kernels/params.h"

namespace mla {

// batch_invariant: a unit is cut into at most this many pieces ...
constexpr int32_t kInvariantMaxSplits = 32;
// ... of at least this many blocks.
constexpr int32_t kInvariantMinBlocks = 32;
// Planners keep an offset for each group at hand.
constexpr int32_t kMaxGroupedParts = 8192;
// Lengths of an even piece that are tried, from the even share up.
constexpr int32_t kEvenTrials = 8;
// Blocks of all tiles together, so that every sum stays below 2^31. Where a request is longer than its part of them
// (its batch is longer than 64 billion tokens then), its last piece gets what is left.
constexpr int32_t kMostBlocks = 1 << 30;

// Of numbers that are not negative: unsigned division takes fewer instructions.
MLA_HOST_DEVICE inline int32_t divide(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}
MLA_HOST_DEVICE inline int32_t ceil_div(int32_t a, int32_t b) {
  return static_cast<int32_t>((static_cast<uint32_t>(a) + static_cast<uint32_t>(b) - 1) / static_cast<uint32_t>(b));
}
MLA_HOST_DEVICE inline int32_t min_of(int32_t a, int32_t b) { return a < b ? a : b; }
MLA_HOST_DEVICE inline int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }

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

// `longest` is most_blocks(p).
MLA_HOST_DEVICE inline RequestWork request_work(const PlanDecodeParams& p, int32_t request, int32_t longest) {
  const int32_t kv_len = p.kv_lens[request];
  int32_t tiles = p.plan.row_tiles;
  if (p.cu_q_lens != nullptr) {
    tiles = ceil_div(query_count(p.cu_q_lens, request, p.max_q_len) * p.heads, p.plan.tile_rows);
  }
  if (kv_len <= 0 || tiles == 0) return {0, 0};
  return {min_of(ceil_div(kv_len, kBlockTokens), longest), tiles};
}

MLA_HOST_DEVICE inline int32_t most_blocks(const PlanDecodeParams& p) {
  return divide(kMostBlocks, max_of(p.batch * p.plan.row_tiles, 1));
}

// What the rule has to know of a whole batch.
struct BatchWork {
  int32_t requests;     // that have work
  int32_t tiles;        // of all requests
  int32_t blocks;       // of all requests
  int32_t tile_blocks;  // of all tiles
  int32_t longest;      // blocks of a request
  int32_t most_tiles, fewest_tiles;

  static MLA_HOST_DEVICE BatchWork none() { return {0, 0, 0, 0, 0, 0, 0x7FFFFFFF}; }

  MLA_HOST_DEVICE void add(RequestWork work) {
    if (work.blocks == 0) return;
    requests += 1;
    tiles += work.tiles;
    blocks += work.blocks;
    tile_blocks += work.blocks * work.tiles;
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
  int32_t most_blocks;     // of a unit
  int32_t units_a_group;   // whole
  int32_t capacity;        // even: blocks that a piece may have
  int32_t length;          // line and batch_invariant: of a group on the line
  int32_t even_share;      // blocks of a group
  int32_t even_share_max;  // what a piece of `even` may have
};

// A group may do this much more than its share where that saves cuts: parts of it in 64, and what writing and reading
// the two pieces of a cut again costs, in blocks of bf16 keys. Where parts are short, latency counts and not bytes.
MLA_HOST_DEVICE inline int32_t with_slack(const PlanDecodeParams& p, int32_t share, int32_t slack) {
  return share + divide(share, 64) * slack + divide(share % 64 * slack, 64) + min_of(p.plan.tile_rows / 9, share / 4);
}

// Blocks that a part has at least. Where there are few in all, single ones end sooner, and the reduction reads few
// pieces; but what is as short as a part stays whole.
MLA_HOST_DEVICE inline int32_t least_blocks(const PlanDecodeParams& p, const BatchWork& work) {
  const int32_t least = max_of(p.min_part_blocks, 1);
  return work.longest > least && work.tile_blocks <= p.few_pieces ? 1 : least;
}

// Never `even`: whether that fits instead of `line` is for the caller to find out, where even_trials() says so.
MLA_HOST_DEVICE inline SplitRule split_rule(const PlanDecodeParams& p, const BatchWork& work) {
  SplitRule rule{};
  const bool alike = work.requests > 0 && work.fewest_tiles == work.most_tiles;
  // Parts that are left over when groups are formed have nothing to do.
  const int32_t left = static_cast<uint32_t>(p.plan.parts) % static_cast<uint32_t>(max_of(work.most_tiles, 1));
  const bool grouped = work.most_tiles <= p.plan.parts && p.plan.parts <= kMaxGroupedParts && left <= p.plan.parts / 16;
  rule.by_request = alike && (grouped || work.most_tiles == 1);
  rule.width = rule.by_request ? work.most_tiles : 1;
  rule.groups = divide(p.plan.parts, rule.width);
  rule.units = rule.by_request ? p.batch : p.batch * p.plan.row_tiles;
  rule.most_blocks = most_blocks(p);
  const int32_t units = rule.by_request ? work.requests : work.tiles;  // that have work
  const int32_t blocks = rule.by_request ? work.blocks : work.tile_blocks;
  const int32_t least = least_blocks(p, work);
  // A multiprocessor without work leaves its bandwidth to the others, but not its arithmetic, which is what counts when
  // several tiles share their keys. And pieces of different lengths do not all end when the longest does.
  const int32_t small_slack = p.slack / 3;
  rule.length = max_of(ceil_div(blocks + units * p.overhead_blocks, rule.groups), least);
  rule.even_share = max_of(ceil_div(blocks, rule.groups), least);
  rule.even_share_max = with_slack(p, rule.even_share, small_slack);
  rule.units_a_group = max_of(ceil_div(units, rule.groups), 1);
  const int32_t most = with_slack(p, rule.length, rule.width == 1 ? p.slack : small_slack);
  const bool whole = rule.units_a_group * (work.longest + p.overhead_blocks) <= most;
  rule.cut = p.batch_invariant ? Cut::kInvariant : whole ? Cut::kWhole : Cut::kLine;
  return rule;
}

MLA_HOST_DEVICE inline bool even_trials(const SplitRule& rule) {
  return rule.cut == Cut::kLine && rule.units_a_group == 1;  // else there are more units than groups
}

// Of a trial: blocks that a piece may have.
MLA_HOST_DEVICE inline int32_t even_capacity(const SplitRule& rule, int32_t trial) {
  return rule.even_share + (rule.even_share_max - rule.even_share) * trial / (kEvenTrials - 1);
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
  const int32_t request = rule.by_request ? unit : divide(unit, p.plan.row_tiles);
  const int32_t tile = rule.by_request ? 0 : unit - request * p.plan.row_tiles;
  const RequestWork work = request_work(p, request, rule.most_blocks);
  return tile < work.tiles ? work.blocks : 0;
}

// Its length on the line.
MLA_HOST_DEVICE inline int32_t unit_cost(const PlanDecodeParams& p, int32_t blocks) {
  return blocks == 0 ? 0 : blocks + p.overhead_blocks;
}

struct UnitCut {
  int32_t count;        // pieces; 0 for a unit without work
  int32_t chunk;        // blocks a piece (not line)
  int32_t first_block;  // on the line (line and batch_invariant)
  int32_t first_group;  // line: of the first piece
};

// `start` is the sum of the costs of all units before this one (only line and batch_invariant use it).
MLA_HOST_DEVICE inline UnitCut cut_unit(const PlanDecodeParams& p, const SplitRule& rule, int32_t blocks,
                                        int32_t start) {
  if (blocks == 0) return {0, 0, 0, 0};
  const int32_t first_block = start + p.overhead_blocks;
  if (rule.cut == Cut::kWhole) return {1, blocks, first_block, 0};
  if (rule.cut == Cut::kLine) {
    const int32_t first_group = divide(first_block, rule.length);
    const int32_t count = divide(first_block - first_group * rule.length + blocks - 1, rule.length) + 1;
    return {count, 0, first_block, first_group};
  }
  const bool even = rule.cut == Cut::kEven;
  const int32_t wanted = ceil_div(blocks, even ? rule.capacity : kInvariantMinBlocks);
  const int32_t chunk = ceil_div(blocks, even ? wanted : min_of(wanted, kInvariantMaxSplits));
  return {ceil_div(blocks, chunk), chunk, first_block, 0};
}

// Of the index-th of all pieces: each group takes one (even) or as many as there are units for it (whole).
MLA_HOST_DEVICE inline int32_t group_in_turn(const SplitRule& rule, int32_t index) {
  return rule.cut == Cut::kEven ? index : divide(index, rule.units_a_group);
}

// Of piece i of a unit, the index-th of all.
MLA_HOST_DEVICE inline int32_t piece_group(const SplitRule& rule, const UnitCut& cut, int32_t i, int32_t index) {
  if (rule.cut == Cut::kLine) return cut.first_group + i;
  if (rule.cut == Cut::kInvariant) return divide(cut.first_block + i * cut.chunk, rule.length);
  return group_in_turn(rule, index);
}

// First block of piece i of a unit that has `blocks`, in the unit; the next piece's is the end of this one.
MLA_HOST_DEVICE inline int32_t piece_begin(const SplitRule& rule, const UnitCut& cut, int32_t i, int32_t blocks) {
  if (i == 0) return 0;
  if (i == cut.count) return blocks;
  return rule.cut == Cut::kLine ? (cut.first_group + i) * rule.length - cut.first_block : i * cut.chunk;
}

// The end of piece i, in tokens.
MLA_HOST_DEVICE inline int32_t piece_end(const SplitRule& rule, const UnitCut& cut, int32_t i, int32_t blocks,
                                         int32_t kv_len) {
  return i + 1 == cut.count ? kv_len : piece_begin(rule, cut, i + 1, blocks) * kBlockTokens;
}

// Bounds from shapes alone: what the arrays of a plan must hold. A cut of the line splits one unit in two, so all split
// units together have at most 2 * (groups - 1) pieces; an even split has no more pieces than groups.
inline int64_t max_items(int64_t tiles, int64_t parts, bool batch_invariant) {
  return batch_invariant ? tiles * kInvariantMaxSplits : tiles + parts;
}
inline int64_t max_partials(int64_t tiles, int64_t parts, bool batch_invariant) {
  return batch_invariant ? tiles * kInvariantMaxSplits : 2 * parts;
}

// Of a GPU's planner: a unit for each thread, and where units may be requests with several tiles the first piece of
// each group.
constexpr int32_t kPlanUnitBytes = 32;
inline int32_t plan_shared_bytes(const DecodePlan& plan, int32_t threads) {
  const int32_t groups = plan.row_tiles > 1 ? min_of(plan.parts, kMaxGroupedParts) / 2 + 1 : 0;
  return threads * kPlanUnitBytes + groups * static_cast<int32_t>(sizeof(int32_t));
}

}  // namespace mla

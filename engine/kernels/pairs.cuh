// pairs.cuh: how pairs of a row and an expert are listed. For router.cu and experts.cu.
//
// A pair is one row and one of its k experts. Pairs are ordered by expert, then row, and the touched experts
// are listed, so that no grid depends on the routing. `groups`, int32:
//
//   [0]                   number of touched experts
//   [1 + j]               the j-th touched expert, ascending                          j < e
//   [1 + e + j]           its first pair; [1 + e + j + 1] is the end of its pairs     j <= e
//   [2 + 2e + p]          row of pair p                                               p < n k
//   [2 + 2e + n k + q]    the pair of row q / k and its choice q % k                  q < n k

#pragma once

#define MAX_EXPERTS 512

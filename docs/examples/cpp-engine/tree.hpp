// tree.hpp: draft trees: the check, what a node sees, the walk (ACC), and the best-first build.
//
// CUDA: host work of a few microseconds; an engine that captures whole rounds moves `walk` and the
// mask onto the device.
#pragma once

#include <algorithm>
#include <queue>
#include <set>

#include "tensors.hpp"

struct Tree {
    Ids tokens, parents; // node 0 is the root, parents precede children
    bool operator==(const Tree &other) const
    {
        return tokens == other.tokens && parents == other.parents;
    }
    std::size_t size() const { return tokens.size(); }
};

struct Walk {
    Ids path;           // nodes, root first
    std::int64_t bonus; // the next root
};

struct Limit { // ACC-4
    std::set<std::int64_t> stop_tokens;
    std::int64_t max_emitted = 0; // 0: none
};

// TREE-1, TREE-2
inline void check_tree(const Tree &tree, std::int64_t vocab_size)
{
    const std::size_t n = tree.size();
    if (!n || tree.parents.size() != n)
        throw Refusal("TreeError", say("the tree has ", n, " tokens and ", tree.parents.size(),
                                       " parents; expected one of each per node, and a root"));
    std::set<std::pair<std::int64_t, std::int64_t>> children;
    for (std::size_t i = 0; i < n; i++) {
        const std::int64_t token = tree.tokens[i], parent = tree.parents[i];
        const auto node = static_cast<std::int64_t>(i);
        if (i == 0 ? parent != -1 : parent < 0 || parent >= node)
            throw Refusal("TreeError", say("parents[", i, "] = ", parent, "; expected ",
                                           i ? say("0..", i - 1) : "-1, node 0 is the root"));
        if (token < 0 || token >= vocab_size)
            throw Refusal("TreeError", say("tokens[", i, "] = ", token, "; expected a token id 0..",
                                           vocab_size - 1));
        if (!children.insert({parent, token}).second)
            throw Refusal("TreeError", say("node ", i, " has the token ", token,
                                           " of a sibling; expected siblings to differ"));
    }
}

inline Ids path_to(const Tree &tree, std::int64_t node)
{
    Ids path;
    for (; node >= 0; node = tree.parents[static_cast<std::size_t>(node)]) path.push_back(node);
    std::reverse(path.begin(), path.end());
    return path;
}

// POS-1: L + depth. Never L + i: that is the slot.
inline Ids tree_positions(const Tree &tree, std::size_t committed_len)
{
    Ids positions(tree.size(), static_cast<std::int64_t>(committed_len));
    for (std::size_t i = 1; i < tree.size(); i++)
        positions[i] = positions[static_cast<std::size_t>(tree.parents[i])] + 1;
    return positions;
}

// MASK-1, MASK-2: [n, L + n]: all committed slots, and the node's own path.
inline Bits tree_mask(const Tree &tree, std::size_t committed_len)
{
    const std::size_t n = tree.size(), s = committed_len + n;
    Bits mask(n * s, 0);
    for (std::size_t i = 0; i < n; i++) {
        std::fill_n(mask.begin() + static_cast<long>(i * s), committed_len, 1);
        for (const auto node : path_to(tree, static_cast<std::int64_t>(i)))
            mask[i * s + committed_len + static_cast<std::size_t>(node)] = 1;
    }
    return mask;
}

// ACC-3: the tokens of path[1:], then the bonus.
inline Ids emitted(const Tree &tree, const Walk &walk)
{
    Ids tokens;
    for (std::size_t k = 1; k < walk.path.size(); k++)
        tokens.push_back(tree.tokens[static_cast<std::size_t>(walk.path[k])]);
    tokens.push_back(walk.bonus);
    return tokens;
}

// ACC-1, ACC-2, ACC-4: greedy, from the root to the child that holds the node's target.
inline Walk walk(const Tree &tree, const Ids &targets, const Limit &limit)
{
    Walk w{{0}, targets[0]};
    for (std::size_t i = 1; i < tree.size(); i++) // children follow: one pass is the walk
        if (tree.parents[i] == w.path.back() && tree.tokens[i] == w.bonus) {
            w.path.push_back(static_cast<std::int64_t>(i));
            w.bonus = targets[i];
        }
    const Ids tokens = emitted(tree, w);
    for (std::size_t j = 0; j < tokens.size(); j++)
        if (limit.stop_tokens.count(tokens[j]) ||
            static_cast<std::int64_t>(j + 1) == limit.max_emitted) {
            w.path.resize(j + 1);
            w.bonus = tokens[j]; // emitted, not cached
            break;
        }
    return w;
}

// TREE-3: the budget's most probable prefixes under draft_logits [depth, w], in float64.
inline Tree best_first(const std::vector<std::vector<double>> &draft_logits, std::size_t budget,
                       std::int64_t root)
{
    std::vector<Ids> ids;                       // per depth, best first
    std::vector<std::vector<double>> log_probs; // of those
    for (const auto &row : draft_logits) {
        const double most = *std::max_element(row.begin(), row.end());
        double sum = 0;
        if (most == -INFINITY) break; // no finite logit: the tree ends here
        for (const double x : row) sum += std::exp(x - most);
        Ids order;
        std::vector<double> scored(row.size());
        for (std::size_t t = 0; t < row.size(); t++) {
            scored[t] = row[t] - most - std::log(sum);
            if (scored[t] > -INFINITY) order.push_back(static_cast<std::int64_t>(t));
        }
        std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
            return scored[static_cast<std::size_t>(a)] > scored[static_cast<std::size_t>(b)];
        });
        order.resize(std::min(order.size(), budget));
        ids.push_back(order);
        log_probs.emplace_back();
        for (const auto t : order) log_probs.back().push_back(scored[static_cast<std::size_t>(t)]);
    }
    struct Offer {
        double score, above; // of the node, and of its parent
        std::vector<std::size_t> ranks;
        std::int64_t parent;
        bool operator<(const Offer &other) const // the greatest is taken: higher, then first in order
        {
            return score != other.score ? score < other.score : ranks > other.ranks;
        }
    };
    std::priority_queue<Offer> heap;
    const auto offer = [&](std::vector<std::size_t> ranks, double above, std::int64_t parent) {
        const std::size_t depth = ranks.size() - 1, rank = ranks.back();
        if (depth < ids.size() && rank < ids[depth].size())
            heap.push({above + log_probs[depth][rank], above, std::move(ranks), parent});
    };
    Tree tree{{root}, {-1}};
    offer({0}, 0.0, 0);
    while (!heap.empty() && tree.size() <= budget) {
        Offer best = heap.top();
        heap.pop();
        tree.tokens.push_back(ids[best.ranks.size() - 1][best.ranks.back()]);
        tree.parents.push_back(best.parent);
        const auto node = static_cast<std::int64_t>(tree.size() - 1);
        std::vector<std::size_t> sibling = best.ranks, child = best.ranks;
        sibling.back()++;
        child.push_back(0);
        offer(std::move(sibling), best.above, best.parent);
        offer(std::move(child), best.score, node);
    }
    return tree;
}

// session.hpp: one sequence: the verbs of contract/interface.py, and what each of them refuses.
//
// Every verb checks its input before it changes anything: after a refusal the cache, the root and
// a pending verify are what they were.
//
// CUDA: `commit` becomes a kernel that copies rows (they increase: walking upwards never overwrites
// an unread one), `round` a captured graph. The checks stay on the host, as they are.
#pragma once

#include <memory>
#include <optional>

#include "forward.hpp"
#include "tree.hpp"

struct Verified {
    Rows logits;
    Ids targets; // argmax per node, the lowest id on a tie
};

class Session {
public:
    // max_len  slots: L + M <= max_len at all times (SLOT-3)
    Session(std::shared_ptr<const Model> model, std::int64_t max_len)
        : model_(std::move(model)), forward_(*model_), cache_(new_cache(max_len))
    {
    }

    std::int64_t committed_len() const { return static_cast<std::int64_t>(length()); }
    std::optional<std::int64_t> root() const { return root_; }

    void set_root(std::int64_t token)
    {
        check_token("root", token);
        root_ = token;
        pending_.reset();
    }

    // tokens, positions [n]; mask [n, L + n]. Returns logits [n, w].
    Rows forward_tokens(const Ids &tokens, const Tensor &positions, const Tensor &mask,
                        const Trace &trace)
    {
        check_tokens("tokens", tokens);
        const std::uint64_t n = tokens.size(), s = length() + n;
        if (positions.shape() != Shape{n} || !positions.is_integer())
            throw Refusal("InputError", say("positions are ", positions.about(),
                                            "; expected integers ", shown({n})));
        Ids where(n);
        for (std::size_t i = 0; i < n; i++) {
            where[i] = positions.integer(i);
            if (where[i] < 0 || where[i] > 0x7fffffff)
                throw Refusal("InputError", say("positions[", i, "] = ", where[i],
                                                "; expected 0..2147483647"));
        }
        if (mask.shape() != Shape{n, s} || mask.raw.dtype != KDTR_BOOL)
            throw Refusal("InputError", say("mask is ", mask.about(), "; expected bool ",
                                            shown({n, s}), ": rows, committed_len + rows"));
        Bits visible(n * s);
        for (std::size_t k = 0; k < visible.size(); k++) visible[k] = mask.integer(k) != 0;
        for (std::size_t i = 0; i < n; i++)
            if (!visible[i * s + length() + i])
                throw Refusal("InputError", say("mask[", i, ", ", length() + i, "] is false; ",
                                                "expected every row to see itself (MASK-1)"));
        check_room("forward_tokens", n);
        return run(tokens, where, visible, std::nullopt, trace);
    }

    // FWD-1: a causal forward, of which all rows stay. Returns the new root.
    std::int64_t prefill(const Ids &tokens, const Trace &trace)
    {
        check_tokens("tokens", tokens);
        check_room("prefill", tokens.size());
        const std::size_t n = tokens.size(), s = length() + n;
        Ids positions(n), rows(n);
        std::iota(rows.begin(), rows.end(), 0);
        std::iota(positions.begin(), positions.end(), committed_len());
        Bits causal(n * s);
        for (std::size_t i = 0; i < n; i++)
            std::fill_n(causal.begin() + static_cast<long>(i * s), length() + i + 1, 1);
        run(tokens, positions, causal, std::nullopt, trace);
        commit({rows, pending_->targets.back()});
        return *root_;
    }

    // FWD-2: the tree of the root alone, committed. Returns the new root.
    std::int64_t decode(const Trace &trace)
    {
        return round({{decided_root()}, {-1}}, Limit(), trace).bonus;
    }

    // draft_logits [depth, w]
    Tree build(const Tensor &draft_logits, std::int64_t budget) const
    {
        const std::int64_t root = decided_root();
        const Shape shape = draft_logits.shape();
        const auto w = static_cast<std::uint64_t>(model_->config.vocab_size);
        if (shape.size() != 2 || shape[1] != w || !draft_logits.is_floating())
            throw Refusal("InputError", say("draft_logits are ", draft_logits.about(),
                                            "; expected floating-point numbers [depth, ", w, "]"));
        std::vector<std::vector<double>> rows(shape[0], std::vector<double>(w));
        for (std::size_t k = 0; k < draft_logits.size(); k++) {
            const double x = rows[k / w][k % w] = draft_logits.number(k);
            if (std::isnan(x) || x == INFINITY)
                throw Refusal("InputError", say("draft_logits[", k / w, ", ", k % w, "] = ", x,
                                                "; expected a finite number or -inf"));
        }
        if (budget < 0)
            throw Refusal("InputError", say("budget = ", budget, "; expected at least 0"));
        check_room("build", static_cast<std::uint64_t>(budget) + 1);
        return best_first(rows, static_cast<std::size_t>(budget), root);
    }

    Verified verify(const Tree &tree, const Trace &trace)
    {
        check_rooted(tree);
        check_room("verify", tree.size());
        trace("parents", -1, {tree.size()}, tree.parents);
        Rows logits = run(tree.tokens, tree_positions(tree, length()), tree_mask(tree, length()),
                          tree, trace);
        return {std::move(logits), pending_->targets};
    }

    // targets: nullptr for those of the latest verify, which must be of this tree.
    Walk accept(const Tree &tree, const Ids *targets, const Limit &limit) const
    {
        check_tree(tree, model_->config.vocab_size);
        check_limit(limit);
        if (!targets) {
            if (!pending_ || !pending_->tree || !(*pending_->tree == tree))
                throw Refusal("SessionError", "accept without targets, but the latest forward is "
                                              "no verify of this tree; verify it first");
            targets = &pending_->targets;
        }
        check_tokens("targets", *targets);
        if (targets->size() != tree.size())
            throw Refusal("InputError", say(targets->size(), " targets for ", tree.size(),
                                            " nodes; expected one per node"));
        return walk(tree, *targets, limit);
    }

    // COMMIT-1 to COMMIT-5: row path[k] moves to slot L + k, in every layer; nothing is rotated.
    void commit(const Walk &walk)
    {
        if (!pending_)
            throw Refusal("SessionError", "commit without a pending forward: there was none, it was "
                                          "committed, or set_root dropped it; verify first (COMMIT-5)");
        check_path(walk.path);
        check_token("bonus", walk.bonus);
        for (std::size_t k = 0; k < walk.path.size(); k++) {
            const std::size_t to = length() + k, from = length() + static_cast<std::size_t>(walk.path[k]);
            cache_.tokens[to] = cache_.tokens[from];
            cache_.positions[to] = cache_.positions[from];
            for (auto *rows : {&cache_.c_kv, &cache_.k_pe})
                for (Rows &layer : *rows) std::copy_n(layer[from], layer.width, layer[to]);
        }
        cache_.committed_len += walk.path.size();
        root_ = walk.bonus;
        pending_.reset();
    }

    // Verify, accept and commit in one. CUDA: the path that production runs; judge it as it ships.
    Walk round(const Tree &tree, const Limit &limit, const Trace &trace)
    {
        check_rooted(tree);
        check_limit(limit);
        const Verified verified = verify(tree, trace);
        const Walk done = walk(tree, verified.targets, limit);
        const std::size_t a = done.path.size();
        Ids moves; // [a, 2]: source and destination slots
        for (std::size_t k = 0; k < a; k++) {
            moves.push_back(committed_len() + done.path[k]);
            moves.push_back(committed_len() + static_cast<std::int64_t>(k));
        }
        trace("targets", -1, {tree.size()}, verified.targets);
        trace("path", -1, {a}, done.path);
        trace("bonus", -1, {}, Ids{done.bonus});
        trace("emitted", -1, {a}, emitted(tree, done));
        trace("moves", -1, {a, 2}, moves);
        commit(done);
        return done;
    }

    // The committed rows: tokens, positions [t], c_kv [l, t, c], k_pe [l, t, r].
    void snapshot(Writer &out, const std::string &prefix) const
    {
        const std::size_t t = length();
        const auto first = [t](const Ids &ids) { return Ids(ids.begin(), ids.begin() + static_cast<long>(t)); };
        out.add(prefix + "tokens", {t}, first(cache_.tokens));
        out.add(prefix + "positions", {t}, first(cache_.positions));
        add_rows(out, prefix + "c_kv", cache_.c_kv);
        add_rows(out, prefix + "k_pe", cache_.k_pe);
    }

    void reset()
    {
        cache_.committed_len = 0;
        root_.reset();
        pending_.reset();
    }

private:
    struct Pending { // the latest forward, not yet committed
        std::size_t n;
        std::optional<Tree> tree; // none: forward_tokens, prefill
        Ids targets;
    };

    std::size_t length() const { return cache_.committed_len; }

    Rows run(const Ids &tokens, const Ids &positions, const Bits &mask, std::optional<Tree> tree,
             const Trace &trace)
    {
        pending_.reset(); // from here on its rows are being overwritten
        Rows logits = forward_.run(cache_, tokens, positions, mask, trace);
        Ids targets;
        for (std::size_t i = 0; i < logits.n; i++)
            targets.push_back(std::max_element(logits[i], logits[i] + logits.width) - logits[i]);
        pending_ = Pending{tokens.size(), std::move(tree), targets};
        return logits;
    }

    Cache new_cache(std::int64_t max_len) const
    {
        const Config &c = model_->config;
        if (max_len < 1 || max_len > c.max_position_embeddings)
            throw Refusal("InputError", say("max_len = ", max_len, "; expected 1..",
                                            "max_position_embeddings = ", c.max_position_embeddings));
        try {
            return Cache(c, static_cast<std::size_t>(max_len));
        } catch (const std::exception &) { // bad_alloc, or no vector is that large
            throw Refusal("CacheError", say("max_len = ", max_len, " needs more memory than there is; ",
                                            "open it with a smaller max_len"));
        }
    }

    void check_room(const char *verb, std::uint64_t n) const
    {
        if (n > cache_.max_len - length())
            throw Refusal("CacheError", say(verb, " of ", n, " rows at committed_len ", length(),
                                            " needs ", length() + n, " slots, the session has ",
                                            cache_.max_len, "; open it with a larger max_len"));
    }

    void check_token(const std::string &what, std::int64_t token) const
    {
        const std::int64_t w = model_->config.vocab_size;
        if (token < 0 || token >= w)
            throw Refusal("InputError", say(what, " = ", token, "; expected a token id 0..", w - 1));
    }

    void check_tokens(const std::string &what, const Ids &tokens) const
    {
        if (tokens.empty()) throw Refusal("InputError", what + " are empty; expected at least one");
        for (std::size_t i = 0; i < tokens.size(); i++) check_token(say(what, "[", i, "]"), tokens[i]);
    }

    static void check_limit(const Limit &limit)
    {
        if (limit.max_emitted < 0)
            throw Refusal("InputError", say("max_emitted = ", limit.max_emitted, "; expected at least 1"));
        if (!limit.stop_tokens.empty() && *limit.stop_tokens.begin() < 0)
            throw Refusal("InputError", "a stop token is below 0; expected token ids");
    }

    std::int64_t decided_root() const
    {
        if (!root_)
            throw Refusal("SessionError", "the session has no root; prefill or set_root first");
        return *root_;
    }

    void check_rooted(const Tree &tree) const
    {
        const std::int64_t root = decided_root();
        check_tree(tree, model_->config.vocab_size);
        if (tree.tokens[0] != root)
            throw Refusal("TreeError", say("the tree's root is token ", tree.tokens[0],
                                           ", the session's is ", root, " (FWD-3)"));
    }

    void check_path(const Ids &path) const
    {
        bool fits = !path.empty() && path[0] == 0 &&
                    path.back() < static_cast<std::int64_t>(pending_->n);
        for (std::size_t k = 1; fits && k < path.size(); k++) fits = path[k] > path[k - 1];
        if (fits && pending_->tree) fits = path == path_to(*pending_->tree, path.back());
        if (!fits)
            throw Refusal("InputError", say("the path of ", path.size(), " nodes is none of the ",
                                            pending_->n, " rows; expected the root, then a child each"));
    }

    void add_rows(Writer &out, const std::string &name, const std::vector<Rows> &layers) const
    {
        std::vector<float> values;
        for (const Rows &rows : layers)
            values.insert(values.end(), rows[0], rows[0] + length() * rows.width);
        out.add(name, {layers.size(), length(), layers[0].width}, values);
    }

    std::shared_ptr<const Model> model_;
    Forward forward_;
    Cache cache_;
    std::optional<std::int64_t> root_;
    std::optional<Pending> pending_;
};

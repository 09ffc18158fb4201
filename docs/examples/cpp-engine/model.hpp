// model.hpp: the configuration and the weights of a KDTR file (docs/golden-bundles.md), in float32.
//
// CUDA: upload here. `Linear` becomes a device pointer in the dtype that your kernels read; what a
// model's source may be (a Hugging Face directory, your own format) is this file's business alone.
#pragma once

#include <map>
#include <set>

#include "tensors.hpp"

struct Yarn { // keys of rope_scaling; NAN: the key is absent
    double factor, beta_fast, beta_slow, mscale = NAN, mscale_all_dim = NAN, attention_factor = NAN;
    std::int64_t original_max_position_embeddings;
};

struct Config { // names are those of config.json
    std::int64_t vocab_size, hidden_size, num_hidden_layers, num_attention_heads, kv_lora_rank,
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim, intermediate_size, first_k_dense_replace,
        moe_intermediate_size, n_routed_experts, n_shared_experts, num_experts_per_tok, n_group,
        topk_group, max_position_embeddings;
    std::int64_t q_lora_rank = 0; // 0: null, queries come from q_proj (MLA-1)
    bool softmax_router, norm_topk_prob, rope_interleave, has_yarn;
    double routed_scaling_factor, rms_norm_eps, latent_norm_eps, rope_theta;
    Yarn yarn;

    std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
};

struct Linear { // [out, in], as checkpoints store it
    std::size_t out = 0, in = 0;
    std::vector<float> w;
    const float *row(std::size_t i) const { return w.data() + i * in; }
};

struct Swiglu {
    Linear gate, up, down;
};

struct Layer {
    std::vector<float> input_norm, q_a_norm, kv_a_norm, post_attention_norm, router_bias;
    Linear q_a, q, kv_a, kv_b, o, router; // kv_b [h (d + v), c]: w_kc and w_vc, head by head
    bool dense;
    Swiglu mlp, shared; // the dense MLP; the shared experts as one
    std::vector<Swiglu> experts;
};

struct Model {
    Config config;
    Linear embedding, lm_head;
    std::vector<float> norm;
    std::vector<Layer> layers;
};

inline Config read_config(Reader &file)
{
    Config c;
    const std::map<std::string, std::int64_t *> sizes = {
        {"vocab_size", &c.vocab_size}, {"hidden_size", &c.hidden_size},
        {"num_hidden_layers", &c.num_hidden_layers},
        {"num_attention_heads", &c.num_attention_heads}, {"kv_lora_rank", &c.kv_lora_rank},
        {"qk_nope_head_dim", &c.qk_nope_head_dim}, {"qk_rope_head_dim", &c.qk_rope_head_dim},
        {"v_head_dim", &c.v_head_dim}, {"intermediate_size", &c.intermediate_size},
        {"moe_intermediate_size", &c.moe_intermediate_size},
        {"n_routed_experts", &c.n_routed_experts},
        {"num_experts_per_tok", &c.num_experts_per_tok}, {"n_group", &c.n_group},
        {"topk_group", &c.topk_group}, {"max_position_embeddings", &c.max_position_embeddings}};
    for (const auto &[name, value] : sizes) {
        *value = file.integer("config/" + name);
        if (*value < 1 || *value > 1 << 30)
            throw Refusal("ConfigError", say(name, " = ", *value, "; expected 1..2^30"));
    }
    c.first_k_dense_replace = file.integer("config/first_k_dense_replace");
    c.n_shared_experts = file.integer("config/n_shared_experts");
    if (file.has("config/q_lora_rank")) c.q_lora_rank = file.integer("config/q_lora_rank");
    c.softmax_router = file.integer("config/scoring_func") == 1;
    c.norm_topk_prob = file.flag("config/norm_topk_prob");
    c.rope_interleave = file.flag("config/rope_interleave");
    c.routed_scaling_factor = file.number("config/routed_scaling_factor");
    c.rms_norm_eps = file.number("config/rms_norm_eps");
    c.latent_norm_eps = file.number("config/latent_norm_eps");
    c.rope_theta = file.number("config/rope_theta");
    c.has_yarn = file.has("config/yarn/factor");
    if (c.has_yarn) {
        const std::string at = "config/yarn/";
        c.yarn.factor = file.number(at + "factor");
        c.yarn.beta_fast = file.number(at + "beta_fast");
        c.yarn.beta_slow = file.number(at + "beta_slow");
        c.yarn.original_max_position_embeddings =
            file.integer(at + "original_max_position_embeddings");
        for (const auto &[name, value] : std::map<std::string, double *>{
                 {"mscale", &c.yarn.mscale}, {"mscale_all_dim", &c.yarn.mscale_all_dim},
                 {"attention_factor", &c.yarn.attention_factor}})
            if (file.has(at + name)) *value = file.number(at + name);
    }
    const std::int64_t per_group = c.n_routed_experts / c.n_group;
    if (c.n_routed_experts % c.n_group || per_group < 2 || c.topk_group > c.n_group ||
        c.num_experts_per_tok > per_group * c.topk_group)
        throw Refusal("ConfigError",
                      say(c.num_experts_per_tok, " of ", c.n_routed_experts, " experts in ",
                          c.topk_group, " of ", c.n_group,
                          " groups; expected groups of one size, 2 at least, that hold as many"));
    if (c.qk_rope_head_dim % 2 || c.n_shared_experts < 0 || c.n_shared_experts > 1 << 20 ||
        c.q_lora_rank < 0 || c.first_k_dense_replace < 0 ||
        c.first_k_dense_replace > c.num_hidden_layers)
        throw Refusal("ConfigError", "qk_rope_head_dim is odd, or a count is out of range");
    return c;
}

class WeightReader {
public:
    WeightReader(Reader &file, const Config &config) : file_(file), c_(config)
    {
        for (const std::string &name : file_.names("weights/")) unused_.insert(name);
    }

    Model model()
    {
        Model m;
        m.config = c_;
        m.embedding = linear("model.embed_tokens.weight", c_.vocab_size, c_.hidden_size);
        for (std::int64_t i = 0; i < c_.num_hidden_layers; i++)
            m.layers.push_back(layer(say("model.layers.", i, "."), i < c_.first_k_dense_replace));
        m.norm = floats("model.norm.weight", {size(c_.hidden_size)});
        m.lm_head = linear("lm_head.weight", c_.vocab_size, c_.hidden_size);
        for (const std::string &name : unused_)
            if (!may_be_ignored(name))
                throw Refusal("CheckpointError", name + " belongs to no layer of the configuration");
        return m;
    }

private:
    static std::uint64_t size(std::int64_t n) { return static_cast<std::uint64_t>(n); }

    Layer layer(const std::string &at, bool dense)
    {
        const std::int64_t m = c_.hidden_size, h = c_.num_attention_heads, c = c_.kv_lora_rank;
        const std::string attention = at + "self_attn.", mlp = at + "mlp.";
        Layer l;
        l.dense = dense;
        l.input_norm = floats(at + "input_layernorm.weight", {size(m)});
        l.post_attention_norm = floats(at + "post_attention_layernorm.weight", {size(m)});
        if (c_.q_lora_rank) {
            l.q_a = linear(attention + "q_a_proj.weight", c_.q_lora_rank, m);
            l.q_a_norm = floats(attention + "q_a_layernorm.weight", {size(c_.q_lora_rank)});
            l.q = linear(attention + "q_b_proj.weight", h * c_.qk_head_dim(), c_.q_lora_rank);
        } else {
            l.q = linear(attention + "q_proj.weight", h * c_.qk_head_dim(), m);
        }
        l.kv_a = linear(attention + "kv_a_proj_with_mqa.weight", c + c_.qk_rope_head_dim, m);
        l.kv_a_norm = floats(attention + "kv_a_layernorm.weight", {size(c)});
        l.kv_b = linear(attention + "kv_b_proj.weight",
                        h * (c_.qk_nope_head_dim + c_.v_head_dim), c);
        l.o = linear(attention + "o_proj.weight", m, h * c_.v_head_dim);
        if (dense) {
            l.mlp = swiglu(mlp, c_.intermediate_size);
            return l;
        }
        l.router = linear(mlp + "gate.weight", c_.n_routed_experts, m);
        l.router_bias = floats(mlp + "gate.e_score_correction_bias", {size(c_.n_routed_experts)});
        const bool stacked = file_.has("weights/" + mlp + "experts.gate_up_proj");
        if (stacked) throw Refusal("UnsupportedError", mlp + "experts are stacked; expected one by one");
        for (std::int64_t e = 0; e < c_.n_routed_experts; e++)
            l.experts.push_back(swiglu(say(mlp, "experts.", e, "."), c_.moe_intermediate_size));
        if (c_.n_shared_experts)
            l.shared = swiglu(mlp + "shared_experts.", c_.moe_intermediate_size * c_.n_shared_experts);
        return l;
    }

    Swiglu swiglu(const std::string &at, std::int64_t inner)
    {
        return {linear(at + "gate_proj.weight", inner, c_.hidden_size),
                linear(at + "up_proj.weight", inner, c_.hidden_size),
                linear(at + "down_proj.weight", c_.hidden_size, inner)};
    }

    Linear linear(const std::string &name, std::int64_t out, std::int64_t in)
    {
        return {size(out), size(in), floats(name, {size(out), size(in)})};
    }

    std::vector<float> floats(const std::string &name, const Shape &shape)
    {
        if (!unused_.erase("weights/" + name))
            throw Refusal("CheckpointError", say(name, " is missing; expected ", shown(shape)));
        const Tensor found = file_.get("weights/" + name);
        if (found.shape() != shape || !found.is_floating())
            throw Refusal("CheckpointError", say(name, " is ", found.about(), "; expected ",
                                                 shown(shape), " of f64, f32, f16 or bf16"));
        std::vector<float> values(found.size());
        for (std::size_t i = 0; i < values.size(); i++) {
            values[i] = static_cast<float>(found.number(i));
            if (!std::isfinite(values[i]))
                throw Refusal("CheckpointError", say(name, " holds NaN or infinity at ", i));
        }
        return values;
    }

    // Released checkpoints bring along rotary buffers, and layers that predict several tokens.
    bool may_be_ignored(const std::string &name) const
    {
        const std::string layers = "weights/model.layers.";
        if (name.compare(0, layers.size(), layers) != 0) return false;
        return std::atoll(name.c_str() + layers.size()) >= c_.num_hidden_layers ||
               name.find(".rotary_emb.inv_freq") != std::string::npos;
    }

    Reader &file_;
    const Config &c_;
    std::set<std::string> unused_;
};

inline Model load_model(Reader &file)
{
    const Config config = read_config(file);
    return WeightReader(file, config).model();
}

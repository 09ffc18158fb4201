// rotary.hpp: rotary positions with YaRN (MLA-4 to MLA-7). Angles in double, results in float.
#pragma once

#include <algorithm>

#include "model.hpp"

inline double mscale(double factor, double m)
{
    return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0;
}

// MLA-4: from the width of a head, never of the latent.
inline double softmax_scale(const Config &c)
{
    const double scale = 1 / std::sqrt(static_cast<double>(c.qk_head_dim()));
    const bool has = c.has_yarn && c.yarn.mscale_all_dim > 0; // false for NAN, an absent key
    return has ? scale * std::pow(mscale(c.yarn.factor, c.yarn.mscale_all_dim), 2) : scale;
}

// MLA-5: what cos and sin are multiplied by.
inline double amplitude(const Config &c)
{
    if (!c.has_yarn) return 1.0;
    const Yarn &y = c.yarn;
    if (y.attention_factor > 0) return y.attention_factor;
    if (y.mscale > 0 && y.mscale_all_dim > 0)
        return mscale(y.factor, y.mscale) / mscale(y.factor, y.mscale_all_dim);
    return mscale(y.factor, 1.0);
}

// MLA-6: radians per position of each of the r / 2 pairs.
inline std::vector<double> inverse_frequencies(const Config &c)
{
    const double r = static_cast<double>(c.qk_rope_head_dim), log_theta = std::log(c.rope_theta);
    const double two_pi = 6.283185307179586;
    double low = 0, high = 1;
    if (c.has_yarn) {
        const auto dim = [&](double turns) { // the pair that makes `turns` over the trained context
            const double length = static_cast<double>(c.yarn.original_max_position_embeddings);
            return r * std::log(length / (turns * two_pi)) / (2 * log_theta);
        };
        low = std::max(std::floor(dim(c.yarn.beta_fast)), 0.0);
        high = std::min(std::ceil(dim(c.yarn.beta_slow)), r - 1);
        if (low == high) high += 0.001;
    }
    std::vector<double> frequencies(static_cast<std::size_t>(c.qk_rope_head_dim / 2));
    for (std::size_t i = 0; i < frequencies.size(); i++) {
        const double at = static_cast<double>(i), plain = std::exp(-log_theta * 2 * at / r);
        const double ramp = c.has_yarn ? std::clamp((at - low) / (high - low), 0.0, 1.0) : 0.0;
        frequencies[i] = ramp ? plain / c.yarn.factor * ramp + plain * (1 - ramp) : plain;
    }
    return frequencies;
}

struct Rotary {
    explicit Rotary(const Config &c)
        : interleave(c.rope_interleave), scale(amplitude(c)), frequencies(inverse_frequencies(c))
    {
    }

    // cos and sin of one position, r / 2 each.
    void table(std::int64_t position, std::vector<float> &cos, std::vector<float> &sin) const
    {
        cos.resize(frequencies.size());
        sin.resize(frequencies.size());
        for (std::size_t i = 0; i < frequencies.size(); i++) {
            const double angle = static_cast<double>(position) * frequencies[i];
            cos[i] = static_cast<float>(scale * std::cos(angle));
            sin[i] = static_cast<float>(scale * std::sin(angle));
        }
    }

    // Turns x [r] into out [r], half-split whatever the pairing: the layout of snapshots (MLA-7).
    void turn(const float *x, const std::vector<float> &cos, const std::vector<float> &sin,
              float *out) const
    {
        const std::size_t half = frequencies.size();
        for (std::size_t i = 0; i < half; i++) {
            const float a = interleave ? x[2 * i] : x[i], b = interleave ? x[2 * i + 1] : x[half + i];
            out[i] = a * cos[i] - b * sin[i];
            out[half + i] = b * cos[i] + a * sin[i];
        }
    }

    bool interleave;
    double scale;
    std::vector<double> frequencies;
};

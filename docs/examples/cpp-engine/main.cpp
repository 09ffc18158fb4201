// main.cpp: a CPU engine for MLA with draft trees, in float32, to be judged and to be copied from.
//
//     make                                             builds build/cpp-engine
//     kdtr gate BUNDLE --engine "stdio:build/cpp-engine"
//     kdtr questions BUNDLE --out q.kdtr && build/cpp-engine q.kdtr a.kdtr && kdtr judge a.kdtr --against BUNDLE
//
//     model.hpp    configuration and weights of a KDTR file
//     forward.hpp  the one forward (with rotary.hpp): what a CUDA author replaces first
//     tree.hpp     draft trees: mask, positions, walk, best-first build
//     session.hpp  the verbs, and what they refuse
//     stdio.cpp    judged as a process: JSON lines (json.hpp), tensors in files (tensors.hpp)
//     offline.cpp  judged by a file: questions in, answers out (docs/offline.md)
#define KDTR_IMPLEMENTATION
#include "engine.hpp"
#include "tensors.hpp"

json::Object engine_info()
{
    json::Object profile; // what you store and sum in: the bounds of the judge follow from it
    for (const char *what : {"weights", "activations", "latents", "scores", "logits", "accumulation"})
        profile[what] = json::text("float32");
    profile["deterministic"] = json::flag(true);
    profile["batch_invariant"] = json::flag(true);

    json::Object info;
    info["kdtr_stdio"] = json::number(1);
    info["name"] = json::text("cpp-engine");
    info["version"] = json::text("1");
    info["device"] = json::text("cpu");
    info["profile"] = json::Value(profile);
    info["verbs"] = json::texts({"set_root", "forward_tokens", "prefill", "decode", "build", "verify",
                                 "accept", "commit", "round", "snapshot", "reset"});
    info["stages"] = json::texts(
        {"parents", "tokens", "positions", "mask", "slots", "embedding", "q_nope", "q_pe", "c_kv",
         "k_pe", "scores", "out_latent", "attn_out", "router_scores", "expert_ids", "expert_weights",
         "mlp_out", "hidden", "final_hidden", "logits", "targets", "path", "bonus", "emitted", "moves"});
    info["conventions"] = json::Value(json::Object());
    return info;
}

int main(int n_arguments, char **arguments)
{
    if (n_arguments == 1) return serve();
    if (n_arguments == 3) return answer(arguments[1], arguments[2]);
    std::fprintf(stderr, "usage: cpp-engine                    speaks the stdio protocol\n"
                         "       cpp-engine QUESTIONS RESULT   answers a file of questions\n");
    return 2;
}
